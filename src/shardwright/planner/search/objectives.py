"""Objectives of a search: the fastest step, the fewest dollars a token, the fewest devices for a deadline, the most
room.

On one cluster the cheapest plan is the fastest, so cost and devices are searched over how many of its nodes are used:
2^i and 3 x 2^i of them, and all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_price import room_bytes
from shardwright.planner.search.results import SearchResult, TriedSize
from shardwright.planner.search.search import search

Name = Literal["time", "cost", "devices", "memory"]
NAMES: tuple[Name, ...] = ("time", "cost", "devices", "memory")
MANY_TOKENS = 1e12
_DAY_S = 86400.0
_SLACK = 1.05  # how much slower than the fastest plan one with more room may be
_HALVINGS = 5  # of the room: to a 32nd of a device


@dataclass(frozen=True)
class Objective:
    """`tokens` to train on, which are MANY_TOKENS where 0, within `days`, where there is a deadline: 0 is none."""

    name: Name = "time"
    tokens: float = 0.0
    days: float = 0.0

    def __post_init__(self) -> None:
        faults = [
            f"{option} is {value:g}, and it must be from 0 to {largest.FACTOR**2:g}; give as many as the run has"
            for option, value in (("--tokens", self.tokens), ("--days", self.days))
            if not 0 <= value <= largest.FACTOR**2
        ]
        if self.name == "devices" and not (self.tokens > 0 and self.days > 0):
            faults.append("the fewest devices are those that meet a deadline; give --tokens and --days")
        elif self.days > 0 and not self.tokens > 0:
            faults.append("days are a deadline for a number of tokens; give --tokens too")
        if faults:
            raise PlanError("what the best plan is", faults)

    @property
    def run_tokens(self) -> float:
        """Tokens of the run whose days and money are told."""
        return self.tokens or MANY_TOKENS

    def in_time(self, token_s: float) -> bool:
        """True if a plan with so many seconds by token meets the deadline."""
        return self.days == 0 or token_s * self.tokens <= self.days * _DAY_S


def best(
    job: JobSpec, constraints: Constraints, constants: Constants, objective: Objective, num_shown: int
) -> tuple[JobSpec, SearchResult]:
    """The job on as many nodes as the objective takes, and what was found there; `check_in_time` says whether that
    meets a deadline.

    Sizes are compared by the fastest plan of each, its step simulated in full.
    """
    tried: dict[int, float] = {}

    def result_of(nodes: int, shown: int = 1) -> SearchResult:
        return search(on_nodes(job, nodes), constraints, constants, shown)

    def token_s_on(nodes: int) -> float:
        if nodes not in tried:
            tried[nodes] = _token_s(result_of, nodes)
        return tried[nodes]

    if objective.name == "memory":
        return job, _roomiest(job, constraints, constants, num_shown)
    nodes = job.cluster.nodes
    if objective.name == "cost":
        nodes = _cheapest(job, objective, token_s_on)
    elif objective.name == "devices":
        nodes = _fewest(job, objective, token_s_on)
    result = result_of(nodes, num_shown)
    each = job.cluster.devices_per_node
    sizes = tuple(TriedSize(nodes * each, tried[nodes]) for nodes in sorted(tried))
    return on_nodes(job, nodes), replace(result, tried=sizes)


def check_in_time(job: JobSpec, objective: Objective, token_s: float) -> None:
    """PlanError if the fastest plan, of so many seconds by token, misses the deadline."""
    if not objective.in_time(token_s):
        raise PlanError(f"job {job.name}", [_too_slow(job, objective, token_s)])


def on_nodes(job: JobSpec, nodes: int) -> JobSpec:
    """The job on some of its nodes, or on more."""
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})})


def node_counts(most: int) -> list[int]:
    """2^i and 3 x 2^i of them, and all, ascending."""
    powers = {times << power for times in (1, 3) for power in range(most.bit_length())}
    return sorted({count for count in powers if count <= most} | {most})


def _token_s(result_of: Callable[[int], SearchResult], nodes: int) -> float:
    """Seconds by token of the fastest plan; endless where none is legal or fits."""
    try:
        candidates = result_of(nodes).candidates
    except PlanError:
        return float("inf")
    if not candidates:
        return float("inf")
    return candidates[0].token_s


def _cheapest(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """Nodes with the fewest device-seconds by token among those that are in time."""
    times = {nodes: token_s_on(nodes) for nodes in node_counts(job.cluster.nodes)}
    in_time = {nodes: token_s for nodes, token_s in times.items() if objective.in_time(token_s)}
    return min(in_time, key=lambda nodes: (nodes * in_time[nodes], nodes), default=job.cluster.nodes)


def _fewest(job: JobSpec, objective: Objective, token_s_on: Callable[[int], float]) -> int:
    """The fewest nodes that are in time, by bisection: more nodes are taken to be faster."""
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
    return (
        f"the fastest plan on all {devices:,} devices takes {token_s * job.tokens_per_step:.3g} s for a step of "
        f"{job.tokens_per_step:,} tokens, so {days:,.3g} days for {objective.tokens:.3g} tokens, and "
        f"{objective.days:g} are asked; use more than {_whole_nodes(job, devices * days / objective.days):,} devices "
        "(--devices, or cluster.nodes; so many would do if each were as fast as now), or fewer tokens"
    )


def _whole_nodes(job: JobSpec, devices: float) -> int:
    each = max(1, job.cluster.devices_per_node)
    return math.ceil(devices / each) * each


def _roomiest(job: JobSpec, constraints: Constraints, constants: Constants, num_shown: int) -> SearchResult:
    """The plans in the least memory in which one is at most a twentieth slower than the fastest."""
    room = room_bytes(job)
    fastest = search(job, constraints, constants, 1)
    if not fastest.candidates:
        return fastest
    most_s = _SLACK * fastest.candidates[0].token_s
    low, high = 0.0, room
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        result = search(job, constraints, constants, 1, room=middle)
        is_enough = bool(result.candidates) and result.candidates[0].token_s <= most_s
        low, high = (low, middle) if is_enough else (middle, high)
    return search(job, constraints, constants, num_shown, room=high)
