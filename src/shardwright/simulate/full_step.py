"""The step of a job simulated in full: its own order of work, with what each stage, message and collective costs.

The closed forms of simulate/closed_form.py take stages for equal in the bubble of some schedules, and messages for
never late. Here every stage has its own seconds, messages occupy links, and gradients are reduced and parameters
gathered beside the computation where the software or the plan does so. All microbatches are simulated; where there are
very many, the last are taken to cost what those before them do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.collective_time import message_latency_s, message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.stage_time import Costing, PieceTime, beside
from shardwright.schedule.job_program import Order, job_order, job_placement
from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement
from shardwright.simulate.batched_timing import Rounds, rounds_of
from shardwright.simulate.closed_form import StepTime, border_bytes, step_time
from shardwright.workload.stage_contents import PipelineRanks, held_by_rank, layer_kinds

_MOST = 2**14  # microbatches that are simulated, each once for each stage


def simulated_step(job: JobSpec, constants: Constants) -> StepTime:
    """Seconds of a step of the job's plan. KeyError says what is not known, ValueError what contradicts itself.

    Without a pipeline, and for schedules that don't drain, it is what `step_time` says.
    """
    return simulated_steps([job], [step_time(run_of(job), constants)], constants)[0]


def simulated_steps(jobs: Sequence[JobSpec], closed: Sequence[StepTime], constants: Constants) -> list[StepTime]:
    """Full steps of several jobs; `closed` are their steps by `step_time`. Jobs in one order are simulated at once."""
    stages = [_Stages.of(job, constants) if is_simulated(job) else None for job in jobs]
    cases = [
        case
        for job, of_job in zip(jobs, stages, strict=True)
        if of_job is not None
        for order in simulated_orders(job)
        for case in _cases(order, of_job)
    ]
    seconds = _seconds(cases)
    return [
        whole if of_job is None else _replaced(whole, *_parts_s(job, of_job, seconds), sets_pace=bool(of_job.gather))
        for job, whole, of_job in zip(jobs, closed, stages, strict=True)
    ]


def step_on_parts_s(alone: Sequence[JobSpec], part_of_rank: Sequence[int], constants: Constants) -> float:
    """Seconds of a step, simulated, on a cluster of several kinds of devices: `alone` is the job on each of its parts,
    were that the cluster, and pipeline rank r lies on part `part_of_rank[r]`. The pipeline drains (`is_simulated`).

    What comes besides is that of the part where it takes longest. A stage that two ranks hold, in opposite directions,
    takes as long as on the slower one, for costs are by stage.
    """
    closed = [step_time(run_of(job), constants) for job in alone]
    job, stages = alone[0], _Stages.on_parts([_Stages.of(job, constants) for job in alone], alone[0], part_of_rank)
    seconds = _seconds(case for order in simulated_orders(job) for case in _cases(order, stages))
    busy_s, bubble_s, messages_s, data_s = _parts_s(job, stages, seconds)
    plain = [time.total - time.slower for time in closed]
    besides_s = max(time.optimizer + time.host + time.other - time.slower for time in closed)
    data_s = max(time.data for time in closed) if data_s is None else max(0.0, data_s)
    slower = max(time.total / without for time, without in zip(closed, plain, strict=True))
    return float((busy_s + max(0.0, bubble_s) + max(0.0, messages_s) + data_s + besides_s) * slower)


def action_costs(job: JobSpec, constants: Constants) -> Costs:
    """Seconds of the actions that are simulated: of stages, messages, and collectives beside them.

    KeyError says what is not known, ValueError what contradicts itself.
    """
    return _Stages.of(job, constants).costs(has_messages=True, has_collectives=True)


def simulated_bubble(job: JobSpec, costs: Costs) -> float:
    """Time in which the rank that computes longest waits for others, in a step in which messages and collectives take
    none: the bubble of `simulated_step`, under any costs of the stages. None is lost without a pipeline that drains."""
    if not is_simulated(job):
        return 0.0
    orders = simulated_orders(job)
    alone = replace(costs, transfer=(), latency=0.0, reduce=(), gather=())
    cases = [_Case(order, False, alone) for order in orders]
    seconds = _seconds(cases)
    (bubble,) = _of_all(job, orders, [[seconds[case].step_s - seconds[case].busy_s] for case in cases])
    return max(0.0, bubble)


def is_simulated(job: JobSpec) -> bool:
    """True if a job has a pipeline that drains, of which closed forms may not say all."""
    return job.plan.pp > 1 and SCHEDULES[job.plan.schedule].drains


def simulated_orders(job: JobSpec) -> tuple[Order, ...]:
    """The orders of work to simulate: the job's own, or two of fewer microbatches, as many apart as it has ranks.

    The last microbatches then cost what these do. That is not always so: an interleaved schedule whose messages are
    slow may become up to 1 % slower with many microbatches.
    """
    order, p = job_order(job), job.plan.pp
    more = order.shape.num_microbatches - max(4 * p, _MOST // job.plan.num_stages)
    if more <= 0:
        return (order,)
    few = order.shape.num_microbatches - p * -(-more // p)
    return tuple(replace(order, shape=replace(order.shape, num_microbatches=m)) for m in (few, few - p))


def _replaced(
    whole: StepTime, busy_s: float, bubble_s: float, messages_s: float, data_s: float | None, sets_pace: bool
) -> StepTime:
    """A step with the parts that were simulated, and what follows from them.

    Closed forms tell the parts of the rank that takes longest, which under ZeRO 3 may be one that gathers much and
    computes little. Simulated gathers are beside the work, and there the rank that computes longest `sets_pace`.
    """
    told = {name: getattr(whole, name) for name in ("compute", "again", "tensor", "context", "expert")}
    told_s = sum(told.values())
    computed_s = busy_s if sets_pace else told_s
    computed = {name: seconds * (computed_s / told_s) for name, seconds in told.items()}
    data = whole.data if data_s is None else max(0.0, data_s)
    bubble, messages = max(0.0, bubble_s), max(0.0, messages_s)
    longer = bubble - whole.bubble + messages - whole.messages + data - whole.data
    longer += computed_s - told_s
    plain = whole.total - whole.slower
    total = (plain + longer) * whole.total / plain
    share = whole.total / total
    slower = total - plain - longer
    return replace(
        whole, **computed, total=total, bubble=bubble, messages=messages, data=data,
        other=whole.other - whole.slower + slower, slower=slower, mfu=whole.mfu * share, hfu=whole.hfu * share,
        low=whole.low / share, high=whole.high / share,
    )  # fmt: skip


@dataclass(frozen=True)
class _Stages:
    """Seconds of one microbatch in each stage, of messages between them, and of collectives about a stage.

    `reduce` and `gather` are empty where they run after the step, and not beside it; `updated_s` is what gathering
    the updated parameters then adds.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer_s: float
    latency_s: float
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    updated_s: float
    leak: float

    @classmethod
    def of(cls, job: JobSpec, constants: Constants) -> "_Stages":
        """The seconds of one plan."""
        run, num_stages = run_of(job), job.plan.num_stages
        grid = run.grid.as_arrays()
        kinds = layer_kinds(run.shape, grid)
        held = held_by_rank(kinds, "1f1b", num_stages, 1, layout=grid.layout, mtp=run.shape.mtp)
        stages = PipelineRanks.of(kinds, [held], np.zeros(1, np.int64))
        # What a stage gathers and scatters is simulated, and so not part of its seconds.
        costing = Costing.of(replace(run, grid=replace(grid, zero=0 * grid.zero)), constants)
        pieces = {kind: costing.piece(*kind) for kind in stages.kinds}
        embedding, head = costing.piece("embedding"), costing.piece("head")
        seconds = embedding.times(stages.embedding) + head.times(stages.head)
        if run.shape.mtp:
            seconds += costing.piece("mtp").times(stages.head * run.shape.mtp)
        for kind, count in zip(stages.kinds, stages.layers, strict=True):
            seconds += pieces[kind].times(count)
        if run.grid.recompute == "stage":  # an action of its own
            seconds = replace(seconds, again=0.0 * seconds.again)
        forward = seconds.forward + seconds.exposed_forward
        rates, size = costing.rates, border_bytes(replace(run, grid=grid), costing.software)
        groups = Groups(replace(run, grid=grid))
        pipeline = groups.pp
        latency_s = message_latency_s(rates, pipeline)
        ends = DataParallel.of(replace(run, grid=grid), costing.software, rates, groups, stages, PieceTime())
        reduce_s, _, gather_s = ends.exchanged_s()
        placement = job_placement(job)
        are_beside = costing.software.reduce_overlap or run.grid.zero >= 2
        return cls(
            forward=_by_stage(forward),
            input_grad=_by_stage(seconds.total - forward - seconds.weight_grad),
            weight_grad=_by_stage(seconds.weight_grad),
            transfer_s=float(np.ravel(message_s(rates, pipeline, size))[0]) - latency_s,
            latency_s=latency_s,
            reduce=_by_stage(reduce_s) if are_beside else (),
            gather=_by_stage(gather_s) if run.grid.zero == 3 else (),
            updated_s=_updated_s(costing.software, ends, gather_s, placement) * (run.grid.zero < 3),
            leak=rates.leak,
        )

    @classmethod
    def on_parts(cls, of_parts: "Sequence[_Stages]", job: JobSpec, part_of_rank: Sequence[int]) -> "_Stages":
        """The seconds of a plan whose pipeline ranks lie on different parts of a cluster."""
        placement = job_placement(job)
        holders = [
            [of_parts[part_of_rank[rank]] for rank in placement.replicas(n)] for n in range(placement.num_stages)
        ]

        def by_stage(name: str) -> tuple[float, ...]:
            there = all(getattr(one, name) for one in of_parts)
            return tuple(max(getattr(one, name)[n] for one in mine) for n, mine in enumerate(holders)) if there else ()

        return cls(
            forward=by_stage("forward"), input_grad=by_stage("input_grad"), weight_grad=by_stage("weight_grad"),
            transfer_s=max(one.transfer_s for one in of_parts), latency_s=max(one.latency_s for one in of_parts),
            reduce=by_stage("reduce"), gather=by_stage("gather"),
            updated_s=max(one.updated_s for one in of_parts), leak=max(one.leak for one in of_parts),
        )  # fmt: skip

    def costs(self, has_messages: bool, has_collectives: bool) -> Costs:
        """The costs of actions, with or without those that are not computing."""
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
    """The time that gathering the updated parameters adds to a step, on the rank that takes longest."""
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
    """Seconds of a step; what the rank that computes longest computes in it; and the longest queue of collectives."""

    step_s: float
    busy_s: float
    queued_s: float


def _cases(order: Order, stages: _Stages) -> list[_Case]:
    """Computing alone, with messages, and with collectives too where these run beside it."""
    has_collectives = bool(stages.reduce or stages.gather)
    simulated = [(False, False), (True, False), (True, True)][: 2 + has_collectives]
    return [_Case(order, has_collectives, stages.costs(*which)) for which in simulated]


def _seconds(cases: Iterable[_Case]) -> dict[_Case, _Seconds]:
    """All that are in one order at once."""
    alike: dict[tuple[Order, bool], dict[_Case, None]] = {}
    for case in cases:
        alike.setdefault((case.order, case.has_collectives), {})[case] = None
    seconds: dict[_Case, _Seconds] = {}
    for (order, has_collectives), group in alike.items():
        rounds = _rounds(order, has_collectives)
        costs = [case.costs for case in group]
        if SCHEDULES[order.schedule].overlaps_steps:
            _, before, last = rounds.ends(costs, 3)
            step_s = last - before
        else:
            (step_s,) = rounds.ends(costs)
        times = zip(step_s.tolist(), rounds.busy(costs).tolist(), rounds.queued(costs).tolist(), strict=True)
        seconds |= {case: _Seconds(*times_of_play) for case, times_of_play in zip(group, times, strict=True)}
    return seconds


@lru_cache(maxsize=32)
def _rounds(order: Order, has_collectives: bool) -> Rounds:
    return rounds_of(order.without_messages(), has_collectives)


def _parts_s(job: JobSpec, stages: _Stages, seconds: dict[_Case, _Seconds]) -> tuple[float, float, float, float | None]:
    """Seconds that the rank that computes longest does so, and does not: (busy, bubble, messages, what replicas do).

    The last is None where nothing runs beside the step.
    """
    orders = simulated_orders(job)
    by_order = []
    for order in orders:
        alone, sent, *seen = (seconds[case] for case in _cases(order, stages))
        exposed = [
            one.step_s - sent.step_s + stages.leak * max(0.0, one.queued_s - one.step_s + sent.step_s) for one in seen
        ]
        by_order.append([alone.busy_s, alone.step_s - alone.busy_s, sent.step_s - alone.step_s, *exposed])
    busy_s, bubble_s, messages_s, *exposed_s = _of_all(job, orders, by_order)
    return busy_s, bubble_s, messages_s, exposed_s[0] + stages.updated_s if exposed_s else None


def _of_all(job: JobSpec, orders: Sequence[Order], by_order: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of all microbatches, from those of the orders that were simulated."""
    all_of = np.array(by_order[0])
    if len(orders) > 1:
        periods = (job.num_microbatches - orders[0].shape.num_microbatches) / job.plan.pp
        all_of += periods * (all_of - by_order[1])
    numbers: list[float] = all_of.tolist()
    return numbers
