"""A lower bound on the time of a step that holds for every schedule on a placement.

Each rank must do all its work, and idles at least
* before its first action, until a microbatch has come down the pipeline to it. More strictly, until a microbatch
  arrives at its second chunk, or comes back as a gradient: before that it runs only forwards, at most as many as its
  memory holds;
* after its last action of a kind, while its product travels on: until the end it runs only the remaining work of the
  microbatches that its memory holds.
A microbatch stays in memory for the time of its way to the end and back, so memory limits how many microbatches pass a
rank in a given time (Little's law). And one microbatch must go all the way.

The bound is attained if zero bubble is possible; if memory is small or microbatches are few, the optimum may lie above
it.
"""

from dataclasses import replace
from math import floor, inf
from typing import Literal

from shardwright.schedule.solver.problem import TINY, F, I, Problem, W
from shardwright.schedule.timing import Costs

Objective = Literal["makespan", "period"]


def placement_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """A lower bound on the time under one placement. If pairs are cheaper than their parts, all work counts at the
    cost that it has in a pair."""
    pair = min(1.0, problem.costs.pair)
    if pair < 1.0:
        cheap = [tuple(pair * time for time in times) for times in problem.times]
        costs: Costs = replace(problem.costs, forward=cheap[F], input_grad=cheap[I], weight_grad=cheap[W], pair=1.0)
        problem = Problem(problem.placement, problem.num_microbatches, costs, problem.sizes, limits=problem.limits)
    spans = [_span(problem, rank, objective) for rank in range(problem.num_ranks)]
    return max(spans) if objective == "period" else max(_one_microbatch(problem), *spans)


def _one_microbatch(problem: Problem) -> float:
    """The time of one microbatch, from the start to its last weight gradient and the update."""
    return problem.backward_start[0] + problem.times[I][0] + problem.times[W][0] + _update(problem, problem.rank_of[0])


def _update(problem: Problem, rank: int) -> float:
    """The least time of an update: the reduction of one stage's gradients, and the optimizer step."""
    reduce = problem.costs.reduce
    return problem.costs.step + (min(reduce[stage] for stage in problem.stages_of[rank]) if reduce else 0.0)


def _span(problem: Problem, rank: int, objective: Objective) -> float:
    """A bound from one rank: from the start of the step to its end, or from the rank's own start to its own end if the
    objective is the period."""
    stages, times, sizes = problem.stages_of[rank], problem.times, problem.sizes
    first, last = stages[0], stages[-1]
    start, end = 0.0, _one_microbatch(problem)
    if objective == "period":
        start = problem.forward_start[first]
        end = problem.backward_start[first] + times[I][first] + times[W][first] + _update(problem, rank)
    forwards = {stage: times[F][stage] for stage in stages}
    backwards = {stage: times[I][stage] + times[W][stage] for stage in stages}
    before_forward = max(
        problem.forward_start[stage]
        - start
        - _most_work(problem, rank, {s: forwards[s] for s in stages if s < stage}, stage)
        for stage in stages
    )
    before_backward = problem.backward_start[last] - start - _most_work(problem, rank, forwards)
    after_forward = end - problem.forward_start[last] - times[F][last] - _most_work(problem, rank, backwards)
    after_backward = max(
        _update(problem, rank),
        *(
            end
            - problem.backward_start[stage]
            - times[I][stage]
            - _most_work(problem, rank, {s: times[W][s] if s >= stage else backwards[s] for s in stages})
            for stage in stages
        ),
    )
    idle = max(before_forward, before_backward) + max(after_forward, after_backward)
    if problem.num_microbatches * sum(sizes[stage] for stage in stages) <= problem.limits[rank]:
        # The last F may end before the first I can start, so these two waits don't add up.
        idle = max(before_forward + max(after_forward, after_backward), before_backward + after_backward)
    work = problem.num_microbatches * sum(forwards[stage] + backwards[stage] for stage in stages)
    return max(work + idle, problem.forward_start[first] - start + _memory_time(problem, rank))


def _memory_time(problem: Problem, rank: int) -> float:
    """The time that all microbatches need in a rank's memory, if as many as fit are there at a time."""
    limit = _usable_memory(problem, rank)
    if limit == inf:
        return 0.0
    times = problem.times
    size_times_stay = sum(
        problem.sizes[s] * (problem.backward_start[s] - problem.forward_start[s] + times[I][s] + times[W][s])
        for s in problem.stages_of[rank]
    )
    return problem.num_microbatches * size_times_stay / limit


def _usable_memory(problem: Problem, rank: int) -> float:
    """A rank's memory limit; if all its stages have equal sizes, rounded down to a multiple of that size."""
    sizes, limit = {problem.sizes[stage] for stage in problem.stages_of[rank]}, problem.limits[rank]
    if len(sizes) > 1 or limit == inf or min(sizes) == 0.0:
        return limit
    size = sizes.pop()
    return size * floor(limit / size * (1 + TINY))


def _most_work(problem: Problem, rank: int, work: dict[int, float], reserved: int | None = None) -> float:
    """The most time of some work for microbatches that are in memory together, given its time by stage.

    This is a knapsack in which a fraction of a microbatch may be kept, so it is an upper bound. Memory for one
    microbatch in the stage `reserved` is left free.
    """
    m, sizes, most = problem.num_microbatches, problem.sizes, 0.0
    free = _usable_memory(problem, rank) - (0.0 if reserved is None else sizes[reserved])
    for stage in sorted(work, key=lambda stage: work[stage] / sizes[stage] if sizes[stage] else inf, reverse=True):
        count = min(m, free / sizes[stage]) if sizes[stage] else m
        most += count * work[stage]
        free -= count * sizes[stage]
    return most
