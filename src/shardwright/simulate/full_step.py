"""The step of a job simulated in full: its own order of work, with the costs of each stage, message and collective.

The closed forms of simulate/closed_form.py assume equal stages in the bubble of some schedules, and messages that are
never late. Here every stage has its own seconds, messages occupy links, and gradients are reduced and parameters
gathered in parallel with the computation if the software or the plan does so. All microbatches are simulated; if there
are very many, the last ones are assumed to cost as much as those before them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, rates_of, software_under
from shardwright.cost.collective_time import message_latency_s, message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.piece_time import beside
from shardwright.layers.memo import Memo
from shardwright.layers.stage_contents import PipelineRanks, PipelineStages, held_by_rank, layer_kinds
from shardwright.schedule.job_program import Order, job_order, job_placement
from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement
from shardwright.simulate.batched_timing import Rounds, rounds_of
from shardwright.simulate.closed_form import StepTime, border_bytes, piece_times, step_time

_MOST = 2**14  # simulated microbatches times stages
_ROUNDING = 1e-9  # share of a step


def simulated_step(job: JobSpec, constants: Constants) -> StepTime:
    """Seconds of a step of the job's plan. KeyError names an unknown input, ValueError a contradiction.

    Without a pipeline, and for schedules that don't drain, the result is that of `step_time`.
    """
    memo = Memo()
    return simulated_steps([job], [step_time(run_of(job), constants, memo)], constants, memo)[0]


def simulated_steps(
    jobs: Sequence[JobSpec], closed: Sequence[StepTime], constants: Constants, memo: Memo
) -> list[StepTime]:
    """Full steps of several jobs; `closed` are their steps by `step_time`. Jobs with one order are simulated at once.
    `memo` has earlier results for the same model, cluster and constants."""
    stages = [_Stages.of(job, constants, memo) if is_simulated(job) else None for job in jobs]
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


def least_steps_s(jobs: Sequence[JobSpec], closed: Sequence[StepTime], constants: Constants, memo: Memo) -> list[float]:
    """A lower bound on the seconds of each of `simulated_steps`, without their orders of work.

    The simulated parts of a step are at least 0, and its computation and messages together at least those of
    `_Stages.least_s`. A step that is extrapolated, or that overlaps with the next one, has no longer bound than its
    computation; nor has one that recomputes stages, whose work is not counted here.
    """
    least = []
    for job, closed_step in zip(jobs, closed, strict=True):
        if not is_simulated(job):
            least.append(float(closed_step.total))
            continue
        stages, facts = _Stages.of(job, constants, memo), SCHEDULES[job.plan.schedule]
        busy_s, least_s = stages.least_s(job_placement(job), job.num_microbatches, facts.splits_weights)
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
    job, part_stages = part_jobs[0], [_Stages.of(job, constants, Memo()) for job in part_jobs]
    stages = _Stages.on_parts(part_stages, job, part_of_rank)
    seconds = _seconds(case for order in simulated_orders(job) for case in _cases(order, stages))
    busy_s, bubble_s, messages_s, data_s = _parts_s(job, stages, seconds)
    plain = [time.total - time.slower for time in closed]
    besides_s = max(time.optimizer + time.host + time.other - time.slower for time in closed)
    data_s = max(time.data for time in closed) if data_s is None else max(0.0, data_s)
    slower = max(time.total / without for time, without in zip(closed, plain, strict=True))
    return float((busy_s + max(0.0, bubble_s) + max(0.0, messages_s) + data_s + besides_s) * slower)


@dataclass(frozen=True)
class TimedActions:
    """The costs of the simulated actions in seconds: of stages, messages, and collectives in parallel with them. Of a
    forward and of a backward by stage, `exposed_forward` and `exposed_backward` seconds are communication that nothing
    hides."""

    costs: Costs
    exposed_forward: tuple[float, ...]
    exposed_backward: tuple[float, ...]


def timed_actions(job: JobSpec, constants: Constants) -> TimedActions:
    """The costs of a job's actions. KeyError names an unknown input, ValueError a contradiction."""
    stages = _Stages.of(job, constants, Memo())
    costs = stages.costs(has_messages=True, has_collectives=True)
    return TimedActions(costs, stages.exposed_forward, stages.exposed_backward)


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
class _Stages:
    """Seconds of one microbatch in each stage, with those of them that are exposed communication, of messages between
    stages, and of each stage's collectives.

    `reduce` and `gather` are empty if they run after the step, and not in parallel with it; `updated_s` is the time
    that the gather of the updated parameters then adds.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    exposed_forward: tuple[float, ...]
    exposed_backward: tuple[float, ...]
    transfer_s: float
    latency_s: float
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    updated_s: float
    leak: float

    @classmethod
    def of(cls, job: JobSpec, constants: Constants, memo: Memo) -> "_Stages":
        """The seconds of one plan."""
        run, num_stages = run_of(job), job.plan.num_stages
        grid = run.grid.as_arrays()
        kinds = layer_kinds(run.shape, grid)
        contents = held_by_rank(kinds, PipelineStages("1f1b", num_stages, 1, grid.layout, mtp=run.shape.mtp))
        stages = PipelineRanks.of(kinds, [contents], np.zeros(1, np.int64))
        # A stage's gathers and reductions are simulated, and so not part of its seconds. What they expose does shorten
        # its waits for the host, as in closed forms.
        pieces = piece_times(replace(run, grid=grid.having({"zero": 0 * grid.zero})), constants, memo)
        if job.plan.zero == 3:
            gathered = piece_times(replace(run, grid=grid), constants, memo)
            pieces = {
                kind: replace(piece, forward=gathered[kind].forward, input_grad=gathered[kind].input_grad)
                for kind, piece in pieces.items()
            }
        seconds = pieces["embedding", "none"].times(stages.embedding) + pieces["head", "none"].times(stages.head)
        if run.shape.mtp:
            seconds += pieces["mtp", "none"].times(stages.head * run.shape.mtp)
        for kind, count in zip(stages.kinds, stages.layers, strict=True):
            seconds += pieces[kind].times(count)
        pace = seconds
        if run.grid.recompute == "stage":  # the recomputation is an action of its own
            seconds = replace(seconds, again=0.0 * seconds.again)
        forward = seconds.forward + seconds.exposed_forward
        run = replace(run, grid=grid)
        software, rates, groups = software_under(run), rates_of(run, constants), Groups(run)
        size = border_bytes(run, software)
        pipeline = groups.pp
        latency_s = float(np.max(message_latency_s(rates, pipeline)))
        ends = DataParallel.of(run, software, rates, groups, stages, pace)
        reduce_s, last_s, gather_s = ends.exchanged_s()
        if job.plan.pp == 1 and job.plan.zero < 3:  # closed forms give its step, and hide part of this
            reduce_s = ends.exposed_reduce_s(reduce_s, last_s)
        placement = job_placement(job)
        are_beside = software.reduce_overlap or job.plan.zero >= 2
        return cls(
            forward=_by_stage(forward),
            input_grad=_by_stage(seconds.total - forward - seconds.weight_grad),
            weight_grad=_by_stage(seconds.weight_grad),
            exposed_forward=_by_stage(seconds.exposed_forward + 0.0 * forward),
            exposed_backward=_by_stage(seconds.exposed - seconds.exposed_forward + 0.0 * forward),
            transfer_s=float(np.ravel(message_s(rates, pipeline, size))[0]) - latency_s,
            latency_s=latency_s,
            reduce=_by_stage(reduce_s) if are_beside else (),
            gather=_by_stage(gather_s) if job.plan.zero == 3 else (),
            updated_s=_updated_s(software, ends, gather_s, placement) * (job.plan.zero < 3),
            leak=rates.leak,
        )

    @classmethod
    def on_parts(cls, parts: "Sequence[_Stages]", job: JobSpec, part_of_rank: Sequence[int]) -> "_Stages":
        """The seconds of a plan whose pipeline ranks lie on different parts of a cluster, from the `parts`' seconds."""
        placement = job_placement(job)
        holders = [[parts[part_of_rank[rank]] for rank in placement.replicas(n)] for n in range(placement.num_stages)]

        def by_stage(name: str) -> tuple[float, ...]:
            if not all(getattr(stages, name) for stages in parts):
                return ()
            return tuple(max(getattr(stages, name)[n] for stages in row) for n, row in enumerate(holders))

        return cls(
            forward=by_stage("forward"),
            input_grad=by_stage("input_grad"),
            weight_grad=by_stage("weight_grad"),
            exposed_forward=by_stage("exposed_forward"),
            exposed_backward=by_stage("exposed_backward"),
            transfer_s=max(stages.transfer_s for stages in parts),
            latency_s=max(stages.latency_s for stages in parts),
            reduce=by_stage("reduce"),
            gather=by_stage("gather"),
            updated_s=max(stages.updated_s for stages in parts),
            leak=max(stages.leak for stages in parts),
        )

    def least_s(self, placement: StagePlacement, num_microbatches: int, splits_weights: bool) -> tuple[float, float]:
        """(Computation of the rank that computes longest, a lower bound on a step with messages), in seconds, in any
        order of work.

        A rank computes one action at a time. It begins when a microbatch has passed all stages before the first of its
        own, and every message on its way. If backwards are whole, its last action is one, and the gradient has still
        to pass the stages before it. So a step takes at least the work of any rank, and the least of these two ways.
        """
        forward, backward = np.array(self.forward), np.add(self.input_grad, self.weight_grad)
        busy_s = np.zeros(placement.num_ranks)
        before_s, after_s = np.full_like(busy_s, np.inf), np.full_like(busy_s, 0.0 if splits_weights else np.inf)
        for holders in map(np.array, placement.holders):
            message_s = (self.transfer_s + self.latency_s) * (np.diff(holders) != 0)
            np.add.at(busy_s, holders, num_microbatches // placement.num_copies * (forward + backward))
            for least, passed_s in ((before_s, forward), (after_s, backward)):
                np.minimum.at(least, holders, np.append(0.0, np.cumsum(passed_s[:-1] + message_s)))
        return float(busy_s.max()), float((before_s + busy_s + after_s).max())

    def costs(self, has_messages: bool, has_collectives: bool) -> Costs:
        """The costs of actions, with or without messages and collectives."""
        num_borders = len(self.forward) - 1
        return Costs(
            self.forward,
            self.input_grad,
            self.weight_grad,
            transfer=(self.transfer_s,) * num_borders if has_messages else (),
            latency=self.latency_s if has_messages else 0.0,
            reduce=self.reduce if has_collectives else (),
            gather=self.gather if has_collectives else (),
        )


def _updated_s(software: SoftwareSpec, ends: DataParallel, gather_s: np.ndarray, placement: StagePlacement) -> float:
    """The time that the gather of the updated parameters adds to a step, on the rank that takes longest."""
    gather, update = _by_stage(gather_s), _by_stage(ends.updates_s())
    ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    gathers_s = [sum(gather[stage] for stage in stages) for stages in ranks]
    if software.update_overlap and not software.gather_overlap:
        updates_s = [sum(update[stage] for stage in stages) for stages in ranks]
        return float(np.max(beside(ends.rates, np.array(gathers_s), np.array(updates_s))))
    return max(gathers_s) * (ends.rates.leak if software.gather_overlap else 1.0)


def _by_stage(seconds: np.ndarray) -> tuple[float, ...]:
    return tuple(seconds[:, 0].tolist())


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


def _cases(order: Order, stages: _Stages) -> list[_Case]:
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
        rounds = _rounds(order, has_collectives)
        costs = [case.costs for case in group]
        if SCHEDULES[order.schedule].overlaps_steps:
            _, previous_end, last_end = rounds.ends(costs, 3)
            step_s = last_end - previous_end
        else:
            (step_s,) = rounds.ends(costs)
        times = zip(step_s.tolist(), rounds.busy(costs).tolist(), rounds.queued(costs).tolist(), strict=True)
        seconds |= {case: _Seconds(*times_of_play) for case, times_of_play in zip(group, times, strict=True)}
    return seconds


@lru_cache(maxsize=64)
def _rounds(order: Order, has_collectives: bool) -> Rounds:
    return rounds_of(order.without_messages(), has_collectives)


def _parts_s(job: JobSpec, stages: _Stages, seconds: dict[_Case, _Seconds]) -> tuple[float, float, float, float | None]:
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
