"""The step of a job simulated in full: its own order of work, with the costs of each stage, message and collective.

The closed forms of simulate/closed_form.py assume equal stages in the bubble of some schedules, and messages that are
never late. Here every stage has its own seconds, messages occupy links, and gradients are reduced and parameters
gathered in parallel with the computation if the software or the plan does so. All microbatches are simulated; if there
are very many, the last ones are assumed to cost as much as those before them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.schedule.job_program import Order, job_order, job_placement
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.timing import Costs
from shardwright.simulate.batched_timing import Floats, Rounds
from shardwright.simulate.closed_form import StepTime, step_time
from shardwright.simulate.round_layout import rounds_of
from shardwright.simulate.stage_seconds import StageSeconds
from shardwright.simulate.steady_state import continued, with_fewer

_MOST = 2**14  # simulated microbatches times stages
_ROUNDING = 1e-9  # share of a step


def simulated_step(job: JobSpec, constants: Constants, memo: Memo | None = None) -> StepTime:
    """Seconds of a step of the job's plan. KeyError names an unknown input, ValueError a contradiction. `memo` has, and
    gets, results for the same model, cluster and constants.

    Without a pipeline, and for schedules that don't drain, the result is that of `step_time`.
    """
    memo = memo or Memo()
    return simulated_steps([job], [step_time(run_of(job), constants, memo)], constants, memo)[0]


def simulated_steps(
    jobs: Sequence[JobSpec], closed: Sequence[StepTime], constants: Constants, memo: Memo
) -> list[StepTime]:
    """Full steps of several jobs; `closed` are their steps by `step_time`. Jobs with one order are simulated at once.
    `memo` has earlier results for the same model, cluster and constants."""
    stages = _stages(jobs, constants, memo)
    cases = [
        case
        for job, job_stages in zip(jobs, stages, strict=True)
        if job_stages is not None
        for order in simulated_orders(job)
        for case in _cases(order, job_stages)
    ]
    seconds = _seconds(cases)
    return [
        closed_step
        if job_stages is None
        else _replaced(closed_step, *_parts_s(job, job_stages, seconds), sets_pace=bool(job_stages.gather))
        for job, closed_step, job_stages in zip(jobs, closed, stages, strict=True)
    ]


def _stages(jobs: Sequence[JobSpec], constants: Constants, memo: Memo) -> list[StageSeconds | None]:
    """The seconds of the stages of each job that is simulated; of jobs that differ only in their layouts at once."""
    places_of_alike: dict[Hashable, list[int]] = {}
    for place, job in enumerate(jobs):
        if is_simulated(job):
            run = run_of(job)
            alike = run.setting, run.grid.having({"layout": ()}), job_placement(job)
            places_of_alike.setdefault(alike, []).append(place)
    stages: dict[int, StageSeconds] = {}
    for places in places_of_alike.values():
        stages |= zip(places, StageSeconds.of_layouts([jobs[n] for n in places], constants, memo), strict=True)
    return [stages.get(place) for place in range(len(jobs))]


def least_steps_s(jobs: Sequence[JobSpec], closed: Sequence[StepTime], constants: Constants, memo: Memo) -> list[float]:
    """A lower bound on the seconds of each of `simulated_steps`, without their orders of work.

    The simulated parts of a step are at least 0, and its computation and messages together at least those of
    `StageSeconds.least_s`. A step that is extrapolated, or that overlaps with the next one, has no longer bound than
    its computation; nor has one that recomputes stages, whose work is not counted here.
    """
    least = []
    for job, closed_step in zip(jobs, closed, strict=True):
        if not is_simulated(job):
            least.append(float(closed_step.total))
            continue
        stages, facts = StageSeconds.of(job, constants, memo), SCHEDULES[job.plan.schedule]
        # Schedules that pair actions compute some weight gradients apart, those of the last microbatches among them.
        is_split = facts.splits_weights or facts.pairs
        busy_s, least_s = stages.least_s(job_placement(job), job.num_microbatches, is_split)
        if len(simulated_orders(job)) > 1 or facts.overlaps_steps or RECOMPUTES[job.plan.recompute].by_stage:
            least_s = busy_s
        data_s = stages.updated_s if stages.reduce or stages.gather else None
        parts = busy_s, least_s - busy_s, 0.0, data_s
        step = _replaced(closed_step, *parts, sets_pace=bool(stages.gather))
        least.append((1 - _ROUNDING) * float(step.total))
    return least


def step_on_parts_s(part_jobs: Sequence[JobSpec], part_of_rank: Sequence[int], constants: Constants) -> float:
    """Seconds of a step, simulated, on a cluster of several kinds of devices. `part_jobs` has the job for each part of
    the cluster, as if that were the cluster, and pipeline rank r lies on part `part_of_rank[r]`. The pipeline drains
    (`is_simulated`).

    The times outside the pipeline are those of the part on which they are longest. A stage that two ranks hold, in
    opposite directions, takes as long as on the slower rank, because costs are by stage.
    """
    closed = [step_time(run_of(job), constants) for job in part_jobs]
    job, part_stages = part_jobs[0], [StageSeconds.of(job, constants, Memo()) for job in part_jobs]
    stages = StageSeconds.on_parts(part_stages, job, part_of_rank)
    seconds = _seconds(case for order in simulated_orders(job) for case in _cases(order, stages))
    busy_s, bubble_s, messages_s, data_s = _parts_s(job, stages, seconds)
    plain = [time.total - time.slower for time in closed]
    besides_s = max(time.optimizer + time.host + time.other - time.slower for time in closed)
    data_s = max(time.data for time in closed) if data_s is None else max(0.0, data_s)
    slower = max(time.total / without for time, without in zip(closed, plain, strict=True))
    return float((busy_s + max(0.0, bubble_s) + max(0.0, messages_s) + data_s + besides_s) * slower)


def simulated_bubble(job: JobSpec, costs: Costs) -> float:
    """Time for which the rank that computes longest waits for others, in a step whose messages and collectives take no
    time: the bubble of `simulated_step`, under any costs of the stages. 0 without a pipeline that drains."""
    if not is_simulated(job):
        return 0.0
    orders = simulated_orders(job)
    compute_costs = replace(costs, transfer=(), latency=0.0, reduce=(), gather=())
    cases = [_Case(order, False, compute_costs) for order in orders]
    seconds = _seconds(cases)
    (bubble,) = _of_all(job, orders, [[seconds[case].step_s - seconds[case].busy_s] for case in cases])
    return max(0.0, bubble)


def is_simulated(job: JobSpec) -> bool:
    """True if a job has a pipeline that drains, so that closed forms may miss something."""
    return job.plan.pp > 1 and SCHEDULES[job.plan.schedule].drains


def simulated_orders(job: JobSpec) -> tuple[Order, ...]:
    """The orders of work to simulate: the job's own, or two with fewer microbatches that differ by as many as it has
    ranks.

    The microbatches left out then cost as much as that difference. This is not always exact: an interleaved schedule
    with slow messages may become up to 1 % slower with many microbatches.
    """
    order, p = job_order(job), job.plan.pp
    num_left_out = order.shape.num_microbatches - max(4 * p, _MOST // job.plan.num_stages)
    if num_left_out <= 0:
        return (order,)
    few = order.shape.num_microbatches - p * -(-num_left_out // p)
    return tuple(replace(order, shape=replace(order.shape, num_microbatches=m)) for m in (few, few - p))


def _replaced(
    closed_step: StepTime, busy_s: float, bubble_s: float, messages_s: float, data_s: float | None, sets_pace: bool
) -> StepTime:
    """A step with the simulated parts, and the other fields adapted to them.

    Closed forms give the parts of the rank that takes longest, which under ZeRO 3 may be one that gathers much and
    computes little. Simulated gathers overlap with the work, and then the rank that computes longest `sets_pace`.
    """
    closed_parts = {name: getattr(closed_step, name) for name in ("compute", "again", "tensor", "context", "expert")}
    closed_parts_s = sum(closed_parts.values())
    computed_s = busy_s if sets_pace else closed_parts_s
    computed = {name: seconds * (computed_s / closed_parts_s) for name, seconds in closed_parts.items()}
    data = closed_step.data if data_s is None else max(0.0, data_s)
    bubble, messages = max(0.0, bubble_s), max(0.0, messages_s)
    longer = bubble - closed_step.bubble + messages - closed_step.messages + data - closed_step.data
    longer += computed_s - closed_parts_s
    plain = closed_step.total - closed_step.slower
    total = (plain + longer) * closed_step.total / plain
    share = closed_step.total / total
    slower = total - plain - longer
    return replace(
        closed_step,
        **computed,
        total=total,
        bubble=bubble,
        messages=messages,
        data=data,
        other=closed_step.other - closed_step.slower + slower,
        slower=slower,
        mfu=closed_step.mfu * share,
        hfu=closed_step.hfu * share,
        low=closed_step.low / share,
        high=closed_step.high / share,
    )


@dataclass(frozen=True)
class _Case:
    """An order of work under some costs."""

    order: Order
    has_collectives: bool
    costs: Costs


@dataclass(frozen=True)
class _Seconds:
    """Seconds of a step; of the computation on the rank that computes longest; of the longest queue of collectives."""

    step_s: float
    busy_s: float
    queued_s: float


def _cases(order: Order, stages: StageSeconds) -> list[_Case]:
    """Cases with computation alone, with messages, and with collectives too if these run in parallel."""
    has_collectives = bool(stages.reduce or stages.gather)
    simulated = [(False, False), (True, False), (True, True)][: 2 + has_collectives]
    return [_Case(order, has_collectives, stages.costs(*exchanges)) for exchanges in simulated]


def _seconds(cases: Iterable[_Case]) -> dict[_Case, _Seconds]:
    """The seconds of all cases; those with one order are simulated at once."""
    groups: dict[tuple[Order, bool], dict[_Case, None]] = {}
    for case in cases:
        groups.setdefault((case.order, case.has_collectives), {})[case] = None
    seconds: dict[_Case, _Seconds] = {}
    for (order, has_collectives), group in groups.items():
        seconds |= zip(group, _played(order, has_collectives, [case.costs for case in group]), strict=True)
    return seconds


def _played(order: Order, has_collectives: bool, costs: Sequence[Costs]) -> list[_Seconds]:
    """The seconds of an order under some costs. Where it repeats its work for long enough, with each further period
    taking the same, fewer microbatches are played."""
    fewer = with_fewer(order)
    if fewer is None:
        return _played_in_full(order, has_collectives, costs)
    rounds = _rounds(fewer.order, has_collectives)
    *columns, is_steady = continued(rounds, costs, fewer)
    answers = _by_costs(*columns, rounds.queued(costs))
    others = np.flatnonzero(~is_steady).tolist()
    if others:
        in_full = _played_in_full(order, has_collectives, [costs[place] for place in others])
        for place, answer in zip(others, in_full, strict=True):
            answers[place] = answer
    return answers


def _played_in_full(order: Order, has_collectives: bool, costs: Sequence[Costs]) -> list[_Seconds]:
    rounds = _rounds(order, has_collectives)
    if SCHEDULES[order.schedule].overlaps_steps:
        _, previous_end, last_end = rounds.ends(costs, 3)
        step_s = last_end - previous_end
    else:
        (step_s,) = rounds.ends(costs)
    return _by_costs(step_s, rounds.busy(costs), rounds.queued(costs))


def _by_costs(*columns: Floats) -> list[_Seconds]:
    """The seconds from a column for each field."""
    return [_Seconds(*times) for times in zip(*(column.tolist() for column in columns), strict=True)]


@lru_cache(maxsize=64)
def _rounds(order: Order, has_collectives: bool) -> Rounds:
    return rounds_of(_without_messages(order), has_collectives)


@lru_cache(maxsize=1)  # an order is laid out with collectives and without them, one after the other
def _without_messages(order: Order) -> Schedule:
    return order.without_messages()


def _parts_s(
    job: JobSpec, stages: StageSeconds, seconds: dict[_Case, _Seconds]
) -> tuple[float, float, float, float | None]:
    """Seconds of the rank that computes longest: (busy, bubble, messages, the replicas' collectives).

    The last is None if no collectives run in parallel with the step.
    """
    orders = simulated_orders(job)
    by_order = []
    for order in orders:
        compute, messages, *with_collectives = (seconds[case] for case in _cases(order, stages))
        exposed = [
            played.step_s - messages.step_s + stages.leak * max(0.0, played.queued_s - played.step_s + messages.step_s)
            for played in with_collectives
        ]
        by_order.append([compute.busy_s, compute.step_s - compute.busy_s, messages.step_s - compute.step_s, *exposed])
    busy_s, bubble_s, messages_s, *exposed_s = _of_all(job, orders, by_order)
    return busy_s, bubble_s, messages_s, exposed_s[0] + stages.updated_s if exposed_s else None


def _of_all(job: JobSpec, orders: Sequence[Order], by_order: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of all microbatches, extrapolated from those of the simulated orders."""
    all_of = np.array(by_order[0])
    if len(orders) > 1:
        periods = (job.num_microbatches - orders[0].shape.num_microbatches) / job.plan.pp
        all_of += periods * (all_of - by_order[1])
    numbers: list[float] = all_of.tolist()
    return numbers
