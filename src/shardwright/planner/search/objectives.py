"""Objectives of a search: the fastest step, the fewest dollars or the least energy a token, the fewest devices for a
deadline, the fewest days with the time that failures take, the most room.

On one cluster the cheapest plan is the fastest, so cost, energy and devices are searched over the number of its nodes:
2^i and 3 x 2^i of them, and all. Devices of one kind have one price and one power (cost/money.py), so the nodes that
take the least energy are the cheapest ones: both are the fewest device-seconds a token. A larger cluster fails more
often, so the fewest days with failures, restarts and checkpoints in them are searched over its nodes, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.cost.calibration import Constants
from shardwright.cost.failures import Goodput, reliability_gaps
from shardwright.cost.run_goodput import job_goodput
from shardwright.memory.job_memories import fullest
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.results import SearchResult, TriedSize
from shardwright.planner.search.search import search

Name = Literal["time", "goodput", "cost", "energy", "devices", "memory"]
NAMES: tuple[Name, ...] = get_args(Name)
REFERENCE_TOKENS = 1e12
_DAY_S = 86400.0
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
        return self.days == 0 or token_s * self.tokens <= self.days * _DAY_S


def best(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective,
    num_shown: int,
    *,
    hosted_within: Callable[[JobSpec], float] | None = None,
) -> tuple[JobSpec, SearchResult]:
    """The job on as many nodes as the objective takes, and the result of the search there. `check_in_time` then checks
    the deadline.

    With `hosted_within` plans with state in host memory alone are searched, of those that have no room without, and of
    these the ones that take at most so many seconds a token, by the job on its nodes.

    Sizes are compared by their fastest plans, whose steps are simulated in full.
    """
    tried: dict[int, float] = {}

    def result_of(nodes: int, shown: int = 1) -> SearchResult:
        sized = on_nodes(job, nodes)
        if hosted_within is None:
            return search(sized, constraints, constants, shown)
        return search(sized, constraints, constants, shown, most_token_s=hosted_within(sized), hosted_only=True)

    def token_s_on(nodes: int) -> float:
        if nodes not in tried:
            tried[nodes] = _token_s(result_of, nodes)
        return tried[nodes]

    if objective.name == "memory":
        return job, _roomiest(job, constraints, constants, num_shown)
    nodes = job.cluster.nodes
    if objective.name in ("cost", "energy"):
        nodes = _fewest_device_s(job, objective, token_s_on)
    elif objective.name == "goodput":
        nodes = _fewest_days(job, objective, token_s_on)
    elif objective.name == "devices":
        nodes = _fewest(job, objective, token_s_on)
    result = result_of(nodes, num_shown)
    per_node = job.cluster.devices_per_node
    sizes = tuple(
        TriedSize(size * per_node, tried[size], objective.training_share(on_nodes(job, size))) for size in sorted(tried)
    )
    return on_nodes(job, nodes), replace(result, tried=sizes)


def check_in_time(job: JobSpec, objective: Objective, token_s: float) -> None:
    """Raise PlanError if the fastest plan, which takes `token_s` seconds a token, misses the deadline."""
    token_s /= objective.training_share(job)
    if not objective.in_time(token_s):
        raise PlanError(say("job {name}", name=job.name), [_too_slow(job, objective, token_s)])


def on_nodes(job: JobSpec, nodes: int) -> JobSpec:
    """The job on another number of nodes."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})})


def node_counts(most: int) -> list[int]:
    """The numbers 2^i and 3 x 2^i up to `most`, and `most`, ascending."""
    powers = {times << power for times in (1, 3) for power in range(most.bit_length())}
    return sorted({count for count in powers if count <= most} | {most})


def _token_s(result_of: Callable[[int], SearchResult], nodes: int) -> float:
    """Seconds a token of the fastest plan; infinite if no plan is legal or fits."""
    try:
        candidates = result_of(nodes).candidates
    except PlanError:
        return float("inf")
    if not candidates:
        return float("inf")
    return candidates[0].token_s


def _fewest_device_s(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The number of nodes with the fewest device-seconds a token among those that meet the deadline."""
    times = {nodes: token_s_on(nodes) for nodes in node_counts(job.cluster.nodes)}
    in_time = {nodes: token_s for nodes, token_s in times.items() if objective.in_time(token_s)}
    return min(in_time, key=lambda nodes: (nodes * in_time[nodes], nodes), default=job.cluster.nodes)


def _fewest_days(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The number of nodes on which a run takes the fewest days with failures. PlanError if their rate is unknown."""
    if gaps := reliability_gaps(job.cluster):
        raise PlanError(say("job {name}", name=job.name), gaps)
    days: dict[int, float] = {}
    for nodes in reversed(node_counts(job.cluster.nodes)):
        days[nodes] = token_s_on(nodes) / objective.training_share(on_nodes(job, nodes))
        if _WORSE * min(days.values()) < days[nodes] < math.inf:
            break
    return min(days, key=lambda nodes: (days[nodes], nodes))


def _fewest(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The fewest nodes that meet the deadline, by bisection: more nodes are assumed to be faster."""
    counts = node_counts(job.cluster.nodes)
    low, high = 0, len(counts) - 1
    while low < high:
        middle = (low + high) // 2
        if objective.in_time(token_s_on(counts[middle])):
            high = middle
        else:
            low = middle + 1
    return counts[low]


def _too_slow(job: JobSpec, objective: Objective, token_s: float) -> str:
    days = token_s * objective.tokens / _DAY_S
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


def _roomiest(job: JobSpec, constraints: Constraints, constants: Constants, num_shown: int) -> SearchResult:
    """The plans in the least memory in which some plan is at most a twentieth slower than the fastest."""
    result = search(job, constraints, constants, 1)
    if not result.candidates:
        return result
    fastest = result.candidates[0]
    most_s = _SLACK * fastest.token_s
    low, high = 0.0, float(fullest(fastest.job, constants).process)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        result = search(job, constraints, constants, 1, room=middle)
        is_enough = bool(result.candidates) and result.candidates[0].token_s <= most_s
        low, high = (low, middle) if is_enough else (middle, high)
    return search(job, constraints, constants, num_shown, room=high)
