"""Objectives of a search: the fastest step, the fewest dollars or the least energy a token, the fewest devices for a
deadline, the fewest days with the time that failures take, the most room.

On one cluster the cheapest plan is the fastest, so cost, energy and devices are searched over its sizes: 2^i and
3 x 2^i nodes, all nodes, and 2^i devices of one node, as they are rented too. Devices of one kind have one price and
one power (cost/money.py), so the size that takes the least energy is the cheapest one: both are the fewest
device-seconds a token. A larger cluster fails more often, so the fewest days with failures, restarts and checkpoints
in them are searched over its sizes, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal, get_args

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.cluster import ClusterSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import DAY_S
from shardwright.cost.calibration import Constants
from shardwright.cost.failures import Goodput, reliability_gaps
from shardwright.cost.run_goodput import job_goodput
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import fullest
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.results import SearchResult, TriedSize
from shardwright.planner.search.search import search

Name = Literal["time", "goodput", "cost", "energy", "devices", "memory"]
NAMES: tuple[Name, ...] = get_args(Name)
REFERENCE_TOKENS = 1e12
_SLACK = 1.05  # times the fastest plan's step that a plan with more room may take
_WORSE = 1.25  # times the fewest days: once a size takes so many, smaller ones are not tried
_HALVINGS = 5  # of the interval of the room: to a 32nd of a device


@dataclass(frozen=True)
class Objective:
    """An objective. `tokens` to train on, 0 for REFERENCE_TOKENS; `days` until the deadline, 0 for none."""

    name: Name = "time"
    tokens: float = 0.0
    days: float = 0.0

    def __post_init__(self) -> None:
        faults = [
            say(
                "{option} is {value:g}, and it must be from 0 to {most:g}; give as many as the run has",
                option=option,
                value=value,
                most=largest.FACTOR**2,
            )
            for option, value in (("--tokens", self.tokens), ("--days", self.days))
            if not 0 <= value <= largest.FACTOR**2
        ]
        if self.name == "devices" and not (self.tokens > 0 and self.days > 0):
            faults.append(say("the fewest devices are those that meet a deadline; give --tokens and --days"))
        elif self.days > 0 and not self.tokens > 0:
            faults.append(say("days are a deadline for a number of tokens; give --tokens too"))
        if faults:
            raise PlanError(say("what the best plan is"), faults)

    def with_tokens_of(self, job: JobSpec) -> "Objective":
        """The objective for a job. If it states no tokens, those of adapters are of the job's own steps: nobody trains
        them on REFERENCE_TOKENS."""
        return replace(self, tokens=job.tokens_of_run) if job.model.is_adapted and not self.tokens else self

    @property
    def run_tokens(self) -> float:
        """Tokens of the run whose days and money are shown."""
        return self.tokens or REFERENCE_TOKENS

    def goodput(self, job: JobSpec) -> Goodput | None:
        """The shares of the time of a run on the job's cluster; None where the objective counts no failures."""
        return job_goodput(job) if self.name == "goodput" else None

    def training_share(self, job: JobSpec) -> float:
        """The share of the time of a run that trains; 1 where the objective counts no failures."""
        goodput = self.goodput(job)
        return 1.0 if goodput is None else float(goodput.training)

    def in_time(self, token_s: float) -> bool:
        """True if a plan that takes `token_s` seconds a token meets the deadline."""
        return self.days == 0 or token_s * self.tokens <= self.days * DAY_S


def _memos() -> Callable[[int], Memo]:
    return lru_cache(maxsize=2)(lambda devices: Memo())


@dataclass(frozen=True)
class EarlierSearches:
    """Results and limits from earlier searches of a job. `memo_of` has the memo of searches on so many devices, of the
    last two sizes: a memo may have a gigabyte. With `hosted_within` plans with state in host memory alone are searched,
    of those that have no room without, and of these the ones that take at most so many seconds a token, by the job on
    its devices. `on_first` gets the job on as many devices as the objective takes, and the seconds a token of the
    fastest plan there that was simulated before any is improved or judged."""

    memo_of: Callable[[int], Memo] = field(default_factory=_memos)
    hosted_within: Callable[[JobSpec], float] | None = None
    on_first: Callable[[JobSpec, float], object] | None = None


def best(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective,
    num_shown: int,
    *,
    earlier: EarlierSearches | None = None,
) -> tuple[JobSpec, SearchResult]:
    """The job on as many devices as the objective takes, and the result of the search there. `check_in_time` checks the
    deadline then.

    Sizes are compared by their fastest plans, whose steps are simulated in full. `earlier` is of searches of the same
    job before.
    """
    earlier = earlier or EarlierSearches()
    tried: dict[int, float] = {}

    def result_of(devices: int, shown: int = 1, is_last: bool = False) -> SearchResult:
        sized, memo = on_devices(job, devices), earlier.memo_of(devices)
        if earlier.hosted_within is None:
            on_first = partial(earlier.on_first, sized) if earlier.on_first and is_last else None
            return search(sized, constraints, constants, shown, memo=memo, on_first=on_first)
        most_s = earlier.hosted_within(sized)
        return search(sized, constraints, constants, shown, memo=memo, most_token_s=most_s, hosted_only=True)

    def token_s_on(devices: int) -> float:
        if devices not in tried:
            tried[devices] = _token_s(result_of, devices)
        return tried[devices]

    if objective.name == "memory":
        return job, _roomiest(job, constraints, constants, num_shown, memo=earlier.memo_of(job.cluster.num_devices))
    devices = job.cluster.num_devices
    if objective.name in ("cost", "energy"):
        devices = _fewest_device_s(job, objective, token_s_on)
    elif objective.name == "goodput":
        devices = _fewest_days(job, objective, token_s_on)
    elif objective.name == "devices":
        devices = _fewest(job, objective, token_s_on)
    result = result_of(devices, num_shown, is_last=True)
    sizes = tuple(
        TriedSize(size, tried[size], objective.training_share(on_devices(job, size))) for size in sorted(tried)
    )
    return on_devices(job, devices), replace(result, tried=sizes)


def check_in_time(job: JobSpec, objective: Objective, token_s: float) -> None:
    """Raise PlanError if the fastest plan, which takes `token_s` seconds a token, misses the deadline."""
    token_s /= objective.training_share(job)
    if not objective.in_time(token_s):
        raise PlanError(say("job {name}", name=job.name), [_too_slow(job, objective, token_s)])


def on_devices(job: JobSpec, devices: int) -> JobSpec:
    """The job on another number of devices: whole nodes of its cluster, or a part of one."""
    cluster = job.cluster
    if devices == cluster.num_devices:
        return job
    per_node = min(devices, cluster.devices_per_node)
    return job.model_copy(
        update={"cluster": cluster.model_copy(update={"nodes": devices // per_node, "devices_per_node": per_node})}
    )


def cluster_sizes(cluster: ClusterSpec) -> list[int]:
    """Numbers of devices of a cluster's sizes, ascending: 2^i of one node where these divide it, and 2^i and 3 x 2^i
    nodes, and all; of a cluster of several parts all its devices alone."""
    if cluster.parts:
        return [cluster.num_devices]
    per_node = cluster.devices_per_node
    parts = [1 << power for power in range(per_node.bit_length()) if per_node % (1 << power) == 0]
    powers = {times << power for times in (1, 3) for power in range(cluster.nodes.bit_length())}
    nodes = {count for count in powers if count <= cluster.nodes} | {cluster.nodes}
    return sorted({*(part for part in parts if part < per_node), *(count * per_node for count in nodes)})


def _token_s(result_of: Callable[[int], SearchResult], devices: int) -> float:
    """Seconds a token of the fastest plan; infinite if no plan is legal or fits."""
    try:
        candidates = result_of(devices).candidates
    except PlanError:
        return float("inf")
    if not candidates:
        return float("inf")
    return candidates[0].token_s


def _fewest_device_s(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The size with the fewest device-seconds a token among those that meet the deadline. Parts of a node are tried
    where one node is the best number of nodes, and as long as they are better."""
    best = larger = job.cluster.num_devices
    best_s = math.inf
    for devices in reversed(cluster_sizes(job.cluster)):
        if devices < job.cluster.devices_per_node and best != larger:
            break
        larger = devices
        token_s = token_s_on(devices)
        if objective.in_time(token_s) and devices * token_s <= best_s:
            best, best_s = devices, devices * token_s
    return best


def _fewest_days(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The size on which a run takes the fewest days with failures. PlanError if their rate is unknown."""
    if gaps := reliability_gaps(job.cluster):
        raise PlanError(say("job {name}", name=job.name), gaps)
    days: dict[int, float] = {}
    for devices in reversed(cluster_sizes(job.cluster)):
        days[devices] = token_s_on(devices) / objective.training_share(on_devices(job, devices))
        if _WORSE * min(days.values()) < days[devices] < math.inf:
            break
    return min(days, key=lambda devices: (days[devices], devices))


def _fewest(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The fewest devices that meet the deadline, by bisection: more devices are assumed to be faster."""
    sizes = cluster_sizes(job.cluster)
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if objective.in_time(token_s_on(sizes[middle])):
            high = middle
        else:
            low = middle + 1
    return sizes[low]


def _too_slow(job: JobSpec, objective: Objective, token_s: float) -> str:
    days = token_s * objective.tokens / DAY_S
    devices = job.cluster.num_devices
    return say(
        "the fastest plan on all {devices:,} devices takes {step_s:.3g} s for a step of {tokens_per_step:,} tokens, "
        "so {days:,.3g} days for {tokens:.3g} tokens, and {deadline:g} are asked; use more than {needed:,} devices "
        "(--devices, or cluster.nodes; so many would do if each were as fast as now), or fewer tokens",
        devices=devices,
        step_s=token_s * job.tokens_per_step,
        tokens_per_step=job.tokens_per_step,
        days=days,
        tokens=objective.tokens,
        deadline=objective.days,
        needed=_whole_nodes(job, devices * days / objective.days),
    )


def _whole_nodes(job: JobSpec, devices: float) -> int:
    per_node = max(1, job.cluster.devices_per_node)
    return math.ceil(devices / per_node) * per_node


def _roomiest(
    job: JobSpec, constraints: Constraints, constants: Constants, num_shown: int, *, memo: Memo
) -> SearchResult:
    """The plans in the least memory in which some plan is at most a twentieth slower than the fastest."""
    search_in = partial(search, job, constraints, constants, memo=memo)
    result = search_in(1)
    if not result.candidates:
        return result
    fastest = result.candidates[0]
    most_s = _SLACK * fastest.token_s
    low, high = 0.0, float(fullest(fastest.job, constants).process)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        result = search_in(1, room=middle)
        is_enough = bool(result.candidates) and result.candidates[0].token_s <= most_s
        low, high = (low, middle) if is_enough else (middle, high)
    return search_in(num_shown, room=high)
