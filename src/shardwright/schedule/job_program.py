"""A job as a schedule: its program, the relative costs of its stages, and the faults of its plan's schedule."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import either, say
from shardwright.config.plan import Reductions
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.lowering.zero3_gathers import reduce_often
from shardwright.schedule.message_sizes import job_sizes
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import AnySchedule, Program, Schedule
from shardwright.schedule.shape_program import shape_faults, shape_order, shape_placement, shape_program
from shardwright.schedule.timing import Costs
from shardwright.sharding.groups import zero_stage
from shardwright.sharding.stage_placement import StagePlacement, placement_of


@dataclass(frozen=True)
class Order:
    """Everything that the order of work of a job depends on. `recompute` is "none" if layers recompute within their
    backward, for then no action does, and all such policies have one order."""

    schedule: str
    shape: PipelineShape
    recompute: str
    gathers: bool
    reduces: Reductions

    def program(self, ranks: Collection[int] | None = None) -> Program:
        """One optimizer step (several if the schedule is asynchronous), all communication written out. If some `ranks`
        are given, the lists of others are empty."""
        return _program_of(self, None if ranks is None else frozenset(ranks))

    def without_messages(self) -> Schedule:
        """The order of a job's work without messages. The times of a step depend on nothing more."""
        order = shape_order(self.schedule, self.shape, self.recompute, self.gathers)
        return _with_reductions(order, self.reduces)


@lru_cache(maxsize=16)  # plans that differ only in sizes have the same program
def _program_of(order: Order, ranks: frozenset[int] | None) -> Program:
    program = shape_program(order.schedule, order.shape, order.recompute, order.gathers, ranks=ranks)
    return _with_reductions(program, order.reduces)


def _with_reductions(program: AnySchedule, reduces: Reductions) -> AnySchedule:
    return program if reduces == "step" else reduce_often(program, by_microbatch=reduces == "microbatch")


def job_order(job: JobSpec, num_steps: int = 1) -> Order:
    """The order of a job's work."""
    plan = job.plan
    zero = max(zero_stage(plan, is_expert) for is_expert in {False, job.model.moe.experts > 0})
    gathers = zero == 3 and plan.gathers_stages
    reduces = plan.reductions if zero >= 2 else "step"
    recompute = plan.recompute if RECOMPUTES[plan.recompute].by_stage else "none"
    return Order(plan.schedule, _shape(job, num_steps), recompute, gathers, reduces=reduces)


def job_program(job: JobSpec, num_steps: int = 1, beside: Program | None = None) -> Program:
    """One optimizer step of the job (several if the schedule is asynchronous), all communication written out.

    `beside` is the program of a step with more microbatches; the new program gets the same placement of stages.
    """
    order = job_order(job, num_steps)
    if beside is not None and order.schedule == "auto":  # it might choose another placement for fewer microbatches
        order = replace(order, shape=replace(order.shape, placement=beside.placement))
    program = order.program()
    return replace(program, sizes=job_sizes(job, program.placement))


def job_placement(job: JobSpec) -> StagePlacement:
    """The placement of a job's stages on the ranks of a pipeline; if bidirectional, for two microbatches."""
    plan = job.plan
    if plan.schedule == "auto" and plan.stages_per_rank > 1 and not plan_faults(job):  # it may choose a V
        return shape_placement("auto", _shape(job, 1))
    return placement_of(plan.schedule, plan.pp, plan.stages_per_rank)


def _shape(job: JobSpec, num_steps: int) -> PipelineShape:
    """The shape for a job's schedule. "auto" may keep as many microbatches as 1F1B does, unless the plan says more."""
    plan, is_auto = job.plan, job.plan.schedule == "auto"
    most_alive, costs = plan.most_alive or plan.pp * is_auto, relative_costs(job) if is_auto else None
    return PipelineShape(
        plan.pp,
        job.num_microbatches,
        plan.virtual_stages,
        plan.extra_warmup,
        num_steps=num_steps,
        most_alive=most_alive,
        costs=costs,
    )


def relative_costs(job: JobSpec, latency: float = 0.0) -> Costs:
    """Costs of a job's stages in proportion to their FLOPs. The unit, also of `latency`, is the forward of the mean
    rank.

    Input and weight gradients take as long as the forward. That is enough to see the bubble, the slowest stage and the
    memory that each rank keeps; only a calibration of the device gives seconds.
    """
    plan = job.plan
    flops = shape_of(job.model).stage_flops(plan.stage_layers(job.model.layers), plan.microbatch_size)
    mean = sum(flops) / plan.pp
    forward = tuple(stage_flops / mean for stage_flops in flops)
    return Costs(forward, forward, forward, latency=latency)


def undrained_steps(job: JobSpec) -> int:
    """Steps until the pipeline drains: 1 if it drains after each step, else the steps to the next log line or
    evaluation."""
    if SCHEDULES[job.plan.schedule].drains:
        return 1
    return min(n for n in (job.optimizer.steps, job.run.log_every, job.run.eval_every) if n)


def steps_to_fill(job: JobSpec) -> int:
    """Steps until the pipeline is as full as possible: 1 if it drains, else enough microbatches for twice its depth."""
    return min(undrained_steps(job), 1 + -(-2 * job.plan.pp // job.num_microbatches))


def plan_faults(job: JobSpec) -> list[str]:
    """All faults of the schedule of a job that has no other faults."""
    faults = shape_faults(job.plan.schedule, _shape(job, undrained_steps(job))) or _ramp_faults(job)
    return _asynchronous_faults(job) + [
        say("{fault} ({letters})", fault=fault, letters=_letters(job)) if " m " in fault or " p " in fault else fault
        for fault in faults
    ]


def _letters(job: JobSpec) -> str:
    """The meanings of p and m in the faults of a job's schedule."""
    plan, num_steps = job.plan, undrained_steps(job)
    letters = say(
        "p is plan.pp {pp}; m is batch.global_batch_size {batch} / (plan.dp {dp} x plan.microbatch_size {size}) = "
        "{microbatches}",
        pp=plan.pp,
        batch=job.batch.global_batch_size,
        dp=plan.dp,
        size=plan.microbatch_size,
        microbatches=job.num_microbatches,
    )
    if num_steps == 1:
        return letters
    return say("{letters}; {steps} steps go by until a log line or an evaluation", letters=letters, steps=num_steps)


def _ramp_faults(job: JobSpec) -> list[str]:
    """Faults of the schedule at a smaller batch of the batch ramp, for the first size that has any."""
    for size in job.batch.sizes()[:-1]:
        smaller = job.at_batch(size)
        if faults := shape_faults(job.plan.schedule, _shape(smaller, undrained_steps(job))):
            return [
                say(
                    "batch.ramp has a batch of {size}, {microbatches} microbatches, on its way to {batch}: {fault}",
                    size=size,
                    microbatches=smaller.num_microbatches,
                    batch=job.batch.global_batch_size,
                    fault=fault,
                )
                for fault in faults
            ]
    return []


def _asynchronous_faults(job: JobSpec) -> list[str]:
    """Faults of fields that need all stages to have the same number of updates at some moment."""
    schedule, faults = job.plan.schedule, list[str]()
    if SCHEDULES[schedule].drains:
        return []
    if job.optimizer.clip_grad_norm > 0:
        faults.append(
            say(
                "schedule {schedule} updates each stage on its own, so there is no global gradient norm to clip, and "
                "optimizer.clip_grad_norm is {norm:g}; set it to 0",
                schedule=repr(schedule),
                norm=job.optimizer.clip_grad_norm,
            )
        )
    for name, is_on, off in (
        ("tied_embeddings", job.model.tied_embeddings, "false"),
        ("mtp_layers", job.model.mtp_layers, 0),
    ):
        if is_on and job.plan.pp > 1:
            faults.append(
                say(
                    "schedule {schedule} updates the first and the last stage at different times, and with "
                    "model.{name} the table of embeddings is one tensor on both; set model.{name} = {off}",
                    schedule=repr(schedule),
                    name=name,
                    off=off,
                )
            )
    if job.precision.scales_loss:
        faults.append(
            say(
                "schedule {schedule} updates each stage on its own, so there is no step that all leave out when "
                "gradients overflow, and precision.loss_scale is {scale:g} with compute in fp16; compute in bf16, or "
                "set precision.loss_scale to 0",
                schedule=repr(schedule),
                scale=job.precision.loss_scale,
            )
        )
    if job.precision.has_delayed_scales:
        others = [facts.name for facts in FLOAT8_RECIPES.values() if not facts.delayed]
        faults.append(
            say(
                "schedule {schedule} updates each stage on its own, and precision.float8 {float8} takes its scales "
                "from steps that end everywhere at once; use {choices}",
                schedule=repr(schedule),
                float8=repr(job.precision.float8),
                choices=either(others),
            )
        )
    return faults
