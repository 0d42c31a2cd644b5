"""A schedule built forward in time: when a rank is free, it takes the best action that is ready.

This is list scheduling, with the rules of Qi et al. 2023 (arXiv 2401.10241), section 3.1, as parameters: warm up with
as many forwards as memory and `warmup` allow, then prefer actions that other ranks wait for, and run weight gradients
when a rank would idle. No rule is best for all costs, so several are tried (`construct_best`).

Memory can't cause a deadlock. A forward starts only if one of each later stage of its rank would still fit after it,
or, with just one later stage, if a microbatch is alive there that will free its memory. Microbatches keep their order
on each stage, so the oldest unfinished microbatch can always go on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Literal

from shardwright.schedule.solver.problem import NONE, TINY, F, I, Problem, Rows, W

Preference = Literal["backward", "forward", "alternate"]
_PREFERENCES: tuple[Preference, ...] = ("backward", "forward", "alternate")


@dataclass(frozen=True)
class Policy:
    """The preferences of a rank.

    `warmup` limits the microbatches between F and I, in multiples of the number that keeps the bottleneck busy during
    the round trip of one microbatch. `prefer` is the kind that goes first if a forward and a backward are ready.
    `deep_forwards`, `deep_backwards`: of two stages, the later goes first. A weight gradient may delay the next arrival
    by `weight_grad_delay` times its own time; a forward doesn't start if a gradient will arrive within `forward_hold`
    times its own time.
    """

    warmup: float = inf
    prefer: Preference = "backward"
    deep_forwards: bool = True
    deep_backwards: bool = False
    weight_grad_delay: float = 0.0
    forward_hold: float = 0.0


_FIRST = (Policy(weight_grad_delay=inf), Policy(1.5, "alternate", weight_grad_delay=inf), Policy(2.0, "forward"))


def _variants(policy: Policy, several_stages: bool) -> list[list[Policy]]:
    """Policies that differ from a policy in one choice; one list per choice."""
    variants = [
        [replace(policy, warmup=warmup) for warmup in (inf, 3.0, 2.0, 1.5, 1.0)],
        [replace(policy, prefer=prefer) for prefer in _PREFERENCES],
        [replace(policy, weight_grad_delay=weight_grad_delay) for weight_grad_delay in (inf, 0.5, 0.0)],
        [replace(policy, forward_hold=forward_hold) for forward_hold in (0.0, 0.5)],
    ]
    if several_stages:
        variants.append([replace(policy, deep_forwards=deep) for deep in (True, False)])
        variants.append([replace(policy, deep_backwards=deep) for deep in (True, False)])
    return variants


def construct_best(problem: Problem, score: Callable[[Rows], float], goal: float) -> list[tuple[float, Rows]]:
    """The orders of all policies that were tried, each with its score, of which less is better; the best first.
    Coordinate descent from a few policies: one choice is changed at a time while the score falls, until it reaches
    `goal`."""
    tried: dict[Policy, tuple[float, Rows]] = {}

    def value(policy: Policy) -> float:
        if policy not in tried:
            rows = construct(problem, policy)
            tried[policy] = score(rows), rows
        return tried[policy][0]

    num_choices = len(_variants(_FIRST[0], len(problem.stages_of[0]) > 1))
    for policy in _FIRST:
        best, improved = policy, True
        while improved and value(best) > goal:
            before = value(best)
            for choice in range(num_choices):
                best = min([best, *_variants(best, len(problem.stages_of[0]) > 1)[choice]], key=value)
            improved = value(best) < before
    return sorted(tried.values(), key=lambda scored: scored[0])


def construct(problem: Problem, policy: Policy) -> Rows:
    """The order that a policy gives."""
    return _Construction(problem, policy).run()


class _Construction:
    """The mutable simulator state of all ranks."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        self._rows: Rows = [[] for _ in range(problem.num_ranks)]
        self._started = [0] * (3 * problem.num_stages)  # by line: that many microbatches
        self._arrival = [-1.0] * len(problem.cost)
        self._free = [0.0] * problem.num_ranks
        self._links = [0.0] * (2 * problem.num_ranks)
        self._alive = [0.0] * problem.num_ranks
        self._in_flight = [0.0] * problem.num_ranks  # the part of `_alive` whose input gradient has not run
        self._last_was_forward = [False] * problem.num_ranks
        self._most_in_flight = [self._cap(rank) for rank in range(problem.num_ranks)]
        self._events = [(0.0, rank) for rank in range(problem.num_ranks)]

    def _cap(self, rank: int) -> float:
        """Limit of the activations in flight on a rank: what keeps the bottleneck busy during a round trip, times the
        policy's warm-up."""
        problem = self._problem
        if problem.period == 0.0 or self._policy.warmup == inf:
            return inf
        in_round_trip = sum(
            problem.sizes[s] * (problem.backward_start[s] - problem.forward_start[s]) for s in problem.stages_of[rank]
        )
        largest = max(problem.sizes[s] for s in problem.stages_of[rank])
        return (self._policy.warmup * in_round_trip / problem.period + largest) * (1 + TINY)

    def run(self) -> Rows:
        """Run until no work is left. Returns the order."""
        while self._events:
            now, rank = heappop(self._events)
            if self._free[rank] <= now + self._problem.time_tolerance:
                op = self._choose(rank, now)
                if op != NONE:
                    self._start(op, rank, now)
        assert all(count == self._problem.num_microbatches for count in self._started), (
            "work is left, and nothing starts"
        )
        return self._rows

    def _start(self, op: int, rank: int, now: float) -> None:
        problem = self._problem
        line = op // problem.num_microbatches
        kind, stage = divmod(line, problem.num_stages)
        self._rows[rank].append(op)
        self._started[line] += 1
        self._free[rank] = end = now + problem.cost[op]
        heappush(self._events, (end, rank))
        self._alive[rank] += problem.sizes[stage] * ((kind == F) - (kind == W))
        self._in_flight[rank] += problem.sizes[stage] * ((kind == F) - (kind == I))
        if kind != W:
            self._last_was_forward[rank] = kind == F
        if problem.consumer[op] != NONE:
            self._arrival[op] = end
            if (link := problem.link[line]) != NONE:
                self._links[link] = max(self._links[link], end) + problem.transfer[line]
                self._arrival[op] = self._links[link] + problem.costs.latency
                receiver = problem.rank_of[problem.consumer[op] // problem.num_microbatches]
                heappush(self._events, (self._arrival[op], receiver))

    def _choose(self, rank: int, now: float) -> int:
        """The operation that an idle rank starts now, or NONE: then the rank waits for its next arrival event."""
        problem, policy = self._problem, self._policy
        m, now_with_tolerance, best, best_key = problem.num_microbatches, now + problem.time_tolerance, NONE, (2, 0)
        next_arrival = next_gradient = inf
        blocked = False
        backwards_first = policy.prefer == "backward" or (policy.prefer == "alternate" and self._last_was_forward[rank])
        for stage in problem.stages_of[rank]:
            for kind in (F, I):
                line = kind * problem.num_stages + stage
                i = self._started[line]
                producer = problem.producer[line * m + i] if i < m else NONE
                arrival = 0.0 if producer == NONE and kind == F else self._arrival[producer]
                if i == m or arrival < 0.0:
                    continue
                if kind == F and not self._admits(rank, stage):
                    blocked = blocked or (arrival <= now_with_tolerance and not self._has_room(rank, stage))
                elif arrival > now_with_tolerance:
                    next_arrival = min(next_arrival, arrival)
                    next_gradient = min(next_gradient, arrival) if kind == I else next_gradient
                else:
                    deep = policy.deep_forwards if kind == F else policy.deep_backwards
                    key = (int((kind == I) != backwards_first), -stage if deep else stage)
                    if key < best_key:
                        best, best_key = line * m + i, key
        if (
            best != NONE
            and best < problem.num_stages * m
            and next_gradient < now + policy.forward_hold * problem.cost[best]
        ):
            best, next_arrival = NONE, next_gradient
        if best == NONE:
            best = self._weight_gradient(rank, inf if blocked else next_arrival - now)
        return best

    def _weight_gradient(self, rank: int, gap: float) -> int:
        """The longest weight gradient that may fill a gap."""
        problem, best, longest = self._problem, NONE, -1.0
        for stage in problem.stages_of[rank]:
            i = self._started[problem.line(W, stage)]
            time = problem.times[W][stage]
            waits = i < self._started[problem.line(I, stage)]
            fills = time <= gap + problem.time_tolerance or time <= gap + self._policy.weight_grad_delay * time
            if waits and fills and time > longest:
                best, longest = problem.line(W, stage) * problem.num_microbatches + i, time
        return best

    def _admits(self, rank: int, stage: int) -> bool:
        """True if a forward may start: its activations fit, and not too many are in flight."""
        is_first = stage == self._problem.stages_of[rank][0]
        after = self._in_flight[rank] + self._problem.sizes[stage]
        return not (is_first and after > self._most_in_flight[rank]) and self._has_room(rank, stage)

    def _has_room(self, rank: int, stage: int) -> bool:
        """True if a forward's activations fit, and work can still go on after it."""
        problem = self._problem
        stages = problem.stages_of[rank]
        later = stages[stages.index(stage) + 1 :]
        if len(stages) == 2 and later and self._started[later[0]] > self._started[problem.line(W, later[0])]:
            later = ()
        return self._alive[rank] + problem.sizes[stage] + sum(problem.sizes[s] for s in later) <= problem.limits[rank]
