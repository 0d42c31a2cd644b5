"""The step of one job simulated in full: its own program, with what each stage, message and collective costs.

The closed forms of simulate/step.py take stages for equal in the bubble of some schedules, and messages for never late.
Here every stage has its own seconds, messages occupy links, and gradients are reduced and parameters gathered beside
the computation where the software or the plan does so. A few microbatches are played, from where on each more costs the
same; what the closed forms miss of these is added to what they say of the whole step.
"""

from dataclasses import dataclass, replace

import numpy as np

from shardwright.cost.calibration import Constants
from shardwright.cost.groups import Groups
from shardwright.cost.replicas import Replicas
from shardwright.cost.stage import Costing, PieceTime
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.job import job_program
from shardwright.schedule.schedule import Program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.step import StepTime, message_bytes, step_time
from shardwright.spec.job import JobSpec
from shardwright.workload.ranks import Ranks, held_by_rank, layer_kinds
from shardwright.workload.run import run_of
from shardwright.workload.shape import Run

_AMONG_OTHERS = ("zb-h2", "zb-v")  # schedules whose next step begins before all ranks have ended the one before


def played_step(job: JobSpec, constants: Constants) -> StepTime:
    """Seconds of a step of the job's plan. KeyError says what is not known, ValueError what contradicts itself.

    Without a pipeline, and for schedules that don't drain, it is what `step_time` says.
    """
    whole = step_time(run_of(job), constants)
    short = _shortened(job)
    program = job_program(short)
    if job.plan.pp == 1 or program.weights != "current":
        return whole
    run = run_of(short)
    closed = step_time(run, constants)
    played = _play(program, _Stages.of(run, program, constants))
    bubble = max(0.0, whole.bubble + played.bubble_s - closed.bubble)
    messages = max(0.0, whole.messages + played.messages_s - closed.messages)
    data = whole.data if played.data_s is None else max(0.0, whole.data + played.data_s - closed.data)
    longer = bubble - whole.bubble + messages - whole.messages + data - whole.data
    plain = whole.total - whole.slower
    total = (plain + longer) * whole.total / plain
    share = whole.total / total
    slower = total - plain - longer
    return replace(
        whole, total=total, bubble=bubble, messages=messages, data=data, other=whole.other - whole.slower + slower,
        slower=slower, mfu=whole.mfu * share, hfu=whole.hfu * share, low=whole.low / share,
        high=whole.high / share,
    )  # fmt: skip


def _shortened(job: JobSpec) -> JobSpec:
    """The job with as many microbatches as two for each rank, or its own where those are fewer."""
    few = min(job.num_microbatches, 2 * job.plan.pp)
    size = few * job.plan.dp * job.plan.microbatch_size
    return job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch_size": size})})


@dataclass(frozen=True)
class _Stages:
    """Seconds of one microbatch in each stage, of messages between them, and of collectives about a stage.

    `reduce` and `gather` are empty where they run after the step, and not beside it; `updated` is what gathering the
    updated parameters then adds.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer_s: float
    latency_s: float
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    updated: tuple[float, ...]
    leak: float

    @classmethod
    def of(cls, run: Run, program: Program, constants: Constants) -> "_Stages":
        """Of one plan."""
        cut = run.cut.as_arrays()
        kinds = layer_kinds(run.shape, cut)
        held = held_by_rank(kinds, "1f1b", program.num_stages, 1, cut.layout)
        stages = Ranks.of(kinds, [held], np.zeros(1, np.int64))
        # What a stage gathers and scatters is played, and so not part of its seconds.
        costing = Costing.of(replace(run, cut=replace(cut, zero=0 * cut.zero)), constants)
        pieces = {kind: costing.piece(*kind) for kind in stages.kinds}
        embedding, head = costing.piece("embedding"), costing.piece("head")
        seconds = embedding.times(stages.embedding) + head.times(stages.head)
        for kind, count in zip(stages.kinds, stages.layers, strict=True):
            seconds += pieces[kind].times(count)
        if run.cut.recompute == "stage":  # an action of its own
            seconds = replace(seconds, again=0.0 * seconds.again)
        forward = seconds.forward + seconds.exposed_forward
        rates, size = costing.rates, message_bytes(replace(run, cut=cut), costing.software)
        groups = Groups(replace(run, cut=cut))
        pipeline = groups.pp
        is_near = bool(pipeline.domains[0] == 1)
        ends = Replicas.of(replace(run, cut=cut), costing.software, rates, groups, stages, PieceTime())
        reduce_s, _, gather_s = ends.exchanged_s()
        are_beside = costing.software.reduce_overlap or run.cut.zero >= 2
        return cls(
            forward=_by_stage(forward),
            input_grad=_by_stage(seconds.total - forward - seconds.weight_grad),
            weight_grad=_by_stage(seconds.weight_grad),
            transfer_s=float(size[0])
            / (rates.link if is_near else rates.network / float(np.ravel(pipeline.stretch)[0])),
            latency_s=rates.link_latency_s if is_near else rates.network_latency_s,
            reduce=_by_stage(reduce_s) if are_beside else (),
            gather=_by_stage(gather_s) if run.cut.zero == 3 else (),
            updated=_by_stage(gather_s * (rates.leak if costing.software.gather_overlap else 1.0) * (run.cut.zero < 3)),
            leak=rates.leak,
        )

    def costs(self, has_messages: bool, has_collectives: bool) -> Costs:
        """What actions take, with or without those that are not computing."""
        num_borders = len(self.forward) - 1
        return Costs(
            self.forward, self.input_grad, self.weight_grad,
            transfer=(self.transfer_s,) * num_borders if has_messages else (),
            latency=self.latency_s if has_messages else 0.0,
            reduce=self.reduce if has_collectives else (), gather=self.gather if has_collectives else (),
        )  # fmt: skip

    def collective_s(self, action: Action) -> float:
        """What an action takes of the collectives' time."""
        if action.kind is Kind.REDUCE and self.reduce:
            return self.reduce[action.stage]
        return self.gather[action.stage] if action.kind is Kind.GATHER and self.gather else 0.0


def _by_stage(seconds: np.ndarray) -> tuple[float, ...]:
    return tuple(seconds[:, 0].tolist())


@dataclass(frozen=True)
class _Played:
    """What is not computing on the rank that computes longest. `data_s` is None where nothing runs beside the step."""

    bubble_s: float
    messages_s: float
    data_s: float | None


def _play(program: Program, stages: _Stages) -> _Played:
    """The program three times: computing alone, with messages, and with collectives too."""

    def makespan(has_messages: bool, has_collectives: bool) -> float:
        costs = stages.costs(has_messages, has_collectives)
        if program.name not in _AMONG_OTHERS:
            return play(program, costs).makespan
        return play(program, costs, 3).makespan - play(program, costs, 2).makespan

    compute = stages.costs(False, False)
    busy = max(sum(compute.compute(part) for a in row for part in a.computes()) for row in program.ranks)
    alone, sent = makespan(False, False), makespan(True, False)
    if not (stages.reduce or stages.gather):
        return _Played(alone - busy, sent - alone, None)
    seen = makespan(True, True) - sent
    beside = max(sum(stages.collective_s(a) for a in row) for row in program.ranks)
    updated = max(
        sum(stages.updated[stage] for stage in program.placement.stages_of(r)) for r in range(program.num_ranks)
    )
    return _Played(alone - busy, sent - alone, seen + stages.leak * max(0.0, beside - seen) + updated)
