"""Closed forms of a schedule: the idle time of a rank in a step, and the number of microbatches that it keeps alive.

Each schedule has its own closed forms (schedule/generators, config/schedule_facts.py), for equal stages and free
communication, in F, I and W: forward, input gradient and weight gradient of a microbatch through all layers of a rank.
If a paper gives a formula for F = I = W only, the others are the lengths of the other paths through the program that
can be the longest, as `schedule/timing.py` finds them. The steps of zb-h2 and zb-v begin before all ranks have ended
the previous step, as in their paper; the bubble is that of a step in the middle of others (Qi et al. 2024, arXiv
2401.10241, section 4). All functions work elementwise on arrays.
"""

import numpy as np

from shardwright.config.phrase import say
from shardwright.config.plan import sums_by_run
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.zero_facts import ZeroFactsSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import PlanGrid


def are_put_off(grid: PlanGrid) -> Numbers:
    """1 for the plans that compute weight gradients apart from the input gradients of their microbatch, else 0."""
    return 1.0 * grid.of_schedules(lambda facts: facts.splits_weights)


def gathers_for_a_pass(grid: PlanGrid, zero: ZeroFactsSpec) -> tuple[Numbers, Numbers]:
    """The numbers of times that ZeRO-3 (gathers parameters for one pass of a microbatch, scatters gradients for its
    backward).

    Without a pipeline layers are gathered one by one, once a pass; in a pipeline whole stages are, for a stretch of
    passes. Software whose gradients add up whole scatters them once a step.
    """
    p, m, v = grid.pp, grid.num_microbatches, grid.virtual
    alone = 1.0 / m if zero.whole_gradients else 1.0

    def gathers(name: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
        return np.where(p > 1, num_gathers(name, p, m, v) / (2.0 * m), 1.0)

    def scatters(name: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
        return np.where(p > 1, num_reductions(name, p, m, sums_by_run(name, v, grid.reduce_each)) / (1.0 * m), alone)

    if len(grid.schedules) == 1:
        name = grid.schedules[0][0]
        return gathers(name, p, m, v), scatters(name, p, m, v)
    return (
        grid.by_schedule(lambda name, at: gathers(name, p[at], m[at], v[at])),
        grid.by_schedule(lambda name, at: scatters(name, p[at], m[at], v[at])),
    )


def in_flight(schedule: str, p: Numbers, rank: Numbers, m: Numbers, v: Numbers, extra_warmup: Numbers = 0) -> Numbers:
    """The number of microbatches whose activations, of all its layers, a pipeline rank keeps at once.

    Exact for m >= 2p; for zb-v with fewer microbatches it is the number of the rank that keeps most. A rank of dualpipe
    has twice the layers, and each microbatch passes through half of them.
    """
    return SCHEDULES[schedule].alive(p, rank, m, v, extra_warmup)


def alive_microbatches(grid: PlanGrid, rank: Numbers) -> Numbers:
    """`in_flight` of each plan's own schedule on the pipeline ranks `rank`, of shape (ranks, plans)."""
    p, m, v, extra_warmup = grid.pp, grid.num_microbatches, grid.virtual, grid.extra_warmup
    return grid.by_schedule(
        lambda name, at: in_flight(name, p[at], rank[:, at], m[at], v=v[at], extra_warmup=extra_warmup[at])
    )


def waiting_losses(grid: PlanGrid) -> Numbers:
    """The number of microbatches whose loss waits for its backward, on the rank with the head."""
    m = grid.num_microbatches
    return grid.by_schedule(lambda name, at: SCHEDULES[name].num_losses(m[at]) + 0.0 * m[at])


def in_flight_split(schedule: str, p: Numbers, rank: Numbers, m: Numbers) -> tuple[Numbers, Numbers]:
    """(microbatches whose activations a pipeline rank keeps, microbatches that wait only for their weight gradients),
    of all its layers, at the moment when most of them wait. (0, 0) for schedules in which none waits long.

    With recompute a microbatch may leave more for its weight gradients than its kept activations, so either moment may
    be the peak.
    """
    waiting = SCHEDULES[schedule].waiting
    none = 0.0 * (p + rank + m)
    alive, deferred = waiting(p, rank, m) if waiting is not None else (none, none)
    return np.where(p == 1, 0.0, alive), np.where(p == 1, 0.0, deferred)


def num_reductions(schedule: str, p: Numbers, m: Numbers, by_run: Numbers) -> Numbers:
    """The number of times that a rank reduces all of its gradients in a step if they are sharded (ZeRO-2).

    It does so for each microbatch or, if `by_run`, after each stretch of backwards of one stage (config/plan.py): every
    p microbatches if a rank passes through its stages in turn, for almost every microbatch if two stages alternate, and
    once if it has one stage or stays with each stage until its last microbatch.
    """
    return np.where(by_run, SCHEDULES[schedule].num_runs(p, m), m)


def num_gathers(schedule: str, p: Numbers, m: Numbers, v: Numbers) -> Numbers:
    """Approximately how often the mean rank of a pipeline gathers all of its parameters in a step if they are sharded
    (ZeRO-3): once for each stretch of work on one stage (schedule/lowering/zero3_gathers.py).

    A rank with one stage has one stretch. A rank that stays with each stage for all microbatches has two for each, but
    the last forward and the first backward are one. If stages take turns, every second computation is of another stage.
    """
    return SCHEDULES[schedule].num_gathers(p, m, v)


def bubble(schedule: str, p: Numbers, m: Numbers, v: Numbers, f: Numbers, i: Numbers, w: Numbers) -> Numbers:
    """The idle time of each rank in a step, in the unit of F, I and W. ValueError if there is no formula."""
    idle_s = SCHEDULES[schedule].idle_s
    if idle_s is None:
        raise ValueError(say("schedule {name} has no formula for its bubble; simulate it", name=repr(schedule)))
    return idle_s(p, m, v, f, i, w)
