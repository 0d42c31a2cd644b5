"""One training step and one evaluation of a rank's part of a job."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.phrase import say
from shardwright.config.rate_schedules import RAMP_UP_RULES, RATE_SCHEDULES
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares, shares_that_count
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.precision.float8_linear import end_step, step_amaxes
from shardwright.schedule.action import Action
from shardwright.schedule.job_program import job_program
from shardwright.train.build import Replica
from shardwright.train.gradient_norm import clip_factor
from shardwright.train.health.step_judge import ALL_IS_WELL, WITHOUT_TARGET, Course, Decision, Judge, go_on
from shardwright.train.router_update import LayerRouting, layer_routings, learn_routing, routing_totals


def learning_rate(spec: OptimizerSpec, step: int, batch_share: float = 1.0, left_out: int = 0) -> float:
    """The learning rate of step 0, 1, ...; `batch_share` is the step's batch size divided by the full one.

    `left_out` is the number of steps before it that changed no weight. The schedule is that of a job without them: they
    do not use up its warm-up, and it ends where this job ends. Megatron-LM's schedule and PyTorch's GradScaler count
    updates in the same way, but leave the end of a decay undone by as many steps.
    """
    if left_out:
        spec, step = spec.model_copy(update={"steps": spec.steps - left_out}), step - left_out
    factor = RAMP_UP_RULES[spec.batch_rule].factor(batch_share)
    if step < spec.warmup_steps:
        return factor * spec.learning_rate * (step + 1) / spec.warmup_steps
    return factor * spec.learning_rate * RATE_SCHEDULES[spec.schedule].peak_fraction(spec, step)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank. `loss` is the mean over the positions of the global batch that have
    a target, and `mtp_losses` are the means for further tokens; a mean over no position is None. A step without any
    target is `skipped`, and where the pipeline drains nothing is computed for it.

    `grad_norm` is None where stages are updated at different times, and in a step that is `skipped`: that leaves the
    weights as they are, because its gradients overflowed or its `decision` says so. `loss_scale` is None where the loss
    is not scaled. `routing` says how each layer with experts used them, and `votes` are numbers of the caller that were
    read with those of the step; two results are equal or not by the rest.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None = None
    skipped: bool = False
    routing: tuple[LayerRouting, ...] = field(default=(), compare=False)
    decision: Decision = field(default=ALL_IS_WELL, compare=False)
    mtp_losses: tuple[float | None, ...] = ()
    votes: tuple[float, ...] = field(default=(), compare=False)


# A function that gives numbers [n] in float64 on the device, the same on every rank. It is called before the update of
# a step, and the host reads its numbers with those of the step, so that it does not wait for them alone.
Votes = Callable[[], Tensor]


def refuse_asynchronous(job: JobSpec, command: str) -> None:
    """PlanError where a job has no steps after which all stages have had the same updates."""
    if job_program(job).weights != "current":
        raise PlanError(
            f"{command} {job.name}",
            [
                say(
                    "schedule {schedule} updates weights while the pipeline is full: by design it has no step that "
                    'one rank could do too; use a schedule that drains, such as plan.schedule = "1f1b"',
                    schedule=repr(job.plan.schedule),
                )
            ],
        )


def microbatches(tokens_BS: Tensor, microbatch_size: int) -> list[Tensor]:
    """A replica's samples, cut into microbatches."""
    return list(tokens_BS.split(microbatch_size))


def numbered_microbatches(
    job: JobSpec, mesh: Mesh, first_step: int, num_steps: int = 1, loss_factor: float = 1.0
) -> list[Microbatch]:
    """The microbatches of this rank's replica over so many steps, each with its step and its first sample."""
    size, first = job.plan.microbatch_size, mesh.dp.index * (job.batch.global_batch_size // job.plan.dp)
    return [
        Microbatch(job.run.seed, step, first + i * size, loss_factor)
        for step in range(first_step, first_step + num_steps)
        for i in range(job.num_microbatches)
    ]


@dataclass(frozen=True)
class _StepNumbers:
    """The numbers that decide about an update, the same on all ranks: the norm of the summed gradients, the losses, and
    for each group of fp8 layers the largest values that its next scales are made from."""

    grad_norm: float
    losses: list[float | None]
    amaxes: list[list[float]]
    routing: tuple[LayerRouting, ...] = ()
    votes: tuple[float, ...] = ()


def train_step(
    replica: Replica,
    step: int,
    tokens_BS: Tensor,
    judge: Judge = go_on,
    left_out: int = 0,
    votes: Votes | None = None,
) -> StepResult:
    """Forward, backward and update. `tokens_BS` [B, S + 1] are the samples of this rank's replica, of a batch that may
    not have grown yet; the `judge` may leave the update out. `left_out` are the steps before that were `skipped`.
    `votes` are cast before the update, but not in a step without a target."""
    job, scaling = replica.job, replica.loss_scale
    rate = learning_rate(job.optimizer, step, job.batch_share(step), left_out)
    scale = scaling.value if scaling is not None else 1.0
    shares = counted_shares(job, replica.mesh, tokens_BS)
    if not shares.targets[0]:  # a token that is further than the next one counts as the next of another
        return without_target(job, rate, scale if scaling is not None else None)
    numbers, decision, is_skipped = _StepNumbers(0.0, [], []), ALL_IS_WELL, False
    routing: Tensor | None = None

    def update(_: Action) -> None:
        nonlocal numbers, decision, is_skipped, routing
        replica.finish_gradients()
        routing = routing_totals(replica)
        # Nothing waits behind the update, so the loss is known before it: all ranks decide on the same numbers.
        numbers = _step_numbers(replica, step, shares, routing, votes)
        assert numbers.losses[0] is not None, "the step has targets"
        decision = judge(step, numbers.losses[0], numbers.grad_norm)
        # The norm is of all gradients of all ranks: they agree on whether one of them is not a number.
        has_overflowed = scaling is not None and not math.isfinite(numbers.grad_norm)
        if scaling is not None:
            scaling.update(has_overflowed)
            if scaling.value != scale:
                replica.rescale_errors(scaling.value / scale)
        is_skipped = has_overflowed or decision.course is not Course.GO_ON
        if not is_skipped:
            clipped = clip_factor(job.optimizer.clip_grad_norm, numbers.grad_norm)
            _update(replica, clipped / scale, rate)
        for layers, amaxes in zip(replica.float8, numbers.amaxes, strict=True):
            end_step(layers.states, amaxes)

    run_step(replica, step, tokens_BS, shares, update)
    if routing is not None and not is_skipped:
        learn_routing(replica, routing)
    return StepResult(
        loss=numbers.losses[0],
        grad_norm=None if is_skipped else numbers.grad_norm,
        learning_rate=rate,
        loss_scale=scale if scaling is not None else None,
        skipped=is_skipped,
        routing=numbers.routing,
        decision=decision,
        mtp_losses=tuple(numbers.losses[1:]),
        votes=numbers.votes,
    )


def _update(replica: Replica, factor: float, rate: float) -> None:
    for shards in replica.shards.values():
        shards.update(factor, rate)


def _step_numbers(
    replica: Replica, step: int, shares: CountedShares, routing: Tensor | None, votes: Votes | None
) -> _StepNumbers:
    """The numbers of a step whose gradients are summed. The host waits for the device once, for all of them. Moves a
    few small all-reduces."""
    mesh, job = replica.mesh, replica.job
    norm = replica.gradient_norm.on_device()
    totals = loss_totals(replica.executor.losses, mesh, len(shares.targets))
    amaxes = [step_amaxes(layers.states, layers.reduce_max, mesh.device) for layers in replica.float8]
    table = routing.flatten() if routing is not None else totals[:0]
    cast = votes() if votes is not None else totals[:0]
    on_device = [norm[None], totals, cast, *(values for values in amaxes if values is not None), table]
    read = mesh.on_host_or_ones(torch.cat([values.double() for values in on_device]))
    numbers = iter(read[: len(read) - len(table)].tolist())
    scale = replica.loss_scale.value if replica.loss_scale is not None else 1.0
    return _StepNumbers(
        grad_norm=next(numbers) / scale,
        losses=means_of([next(numbers) for _ in totals], job.at_step(step), shares.targets),
        votes=tuple(next(numbers) for _ in cast),
        amaxes=[[next(numbers) for _ in values] if values is not None else [] for values in amaxes],
        routing=_routing_of(job, routing, read[len(read) - len(table) :]),
    )


def _routing_of(job: JobSpec, table: Tensor | None, numbers: Tensor) -> tuple[LayerRouting, ...]:
    """The routing of each layer with experts, from the numbers of the table in host memory; () in a dry run."""
    return () if table is None or table.is_meta else layer_routings(job, numbers.view(table.shape))


def without_target(job: JobSpec, rate: float, loss_scale: float | None = None) -> StepResult:
    """The result of a step whose global batch has no target."""
    further = (None,) * job.model.mtp_layers
    return StepResult(None, None, rate, loss_scale, skipped=True, decision=WITHOUT_TARGET, mtp_losses=further)


def run_step(
    replica: Replica, step: int, tokens_BS: Tensor, shares: CountedShares, update: Callable[[Action], None]
) -> None:
    """Run the forward and backward passes of a step with the batch that the job has then, and at its end `update`.
    `shares` are the parts of all positions that have a target with a loss, and that have a real token."""
    job = replica.job.at_step(step)
    scale = replica.loss_scale.value if replica.loss_scale is not None else 1.0
    for shards in replica.shards.values():
        shards.clear_gradients()
    # Gradients are summed over microbatches and replicas, each of a mean over tokens.
    mean = 1.0 / (job.num_microbatches * job.plan.replicas)
    tokens = microbatches(tokens_BS, job.plan.microbatch_size)
    samples = numbered_microbatches(job, replica.mesh, step, loss_factor=mean * scale / shares.real)
    factors = loss_factors(job, mean * scale, shares.targets)
    replica.executor.run(replica.program_of(job), tokens, update, samples, lambda _: factors)


def loss_factors(job: JobSpec, mean: float, shares: Sequence[float]) -> tuple[float, ...]:
    """The factors of the gradients of a microbatch's losses: `mean` for those that count, and for further tokens the
    share of model.mtp_weight that each has; 0 if none counts."""
    model = job.model
    weights = 1.0, *([model.mtp_weight / model.mtp_layers] * model.mtp_layers if model.mtp_layers else ())
    return tuple(weight * mean / share if share else 0.0 for weight, share in zip(weights, shares, strict=True))


def counted_shares(job: JobSpec, mesh: Mesh, tokens_BS: Tensor) -> CountedShares:
    """The shares of the positions of a global batch that have a next token with a loss, and further tokens, from this
    replica's part; and a real token, if a router has losses."""
    model = job.model
    if job.data.separate_documents:
        return shares_that_count(tokens_BS, mesh.dp, model.mtp_layers, with_real=model.has_router_losses)
    further = range(1 + model.mtp_layers)
    return CountedShares(tuple((model.sequence - distance) / model.sequence for distance in further))


def evaluate(replica: Replica, tokens_BS: Tensor) -> float | None:
    """Mean loss of one global batch, without gradients; None where it has no target."""
    job, mesh = replica.job, replica.mesh
    losses = microbatch_losses(replica, microbatches(tokens_BS, job.plan.microbatch_size))
    return mean_losses(losses, job, mesh, counted_shares(job, mesh, tokens_BS).targets[:1])[0]


def microbatch_losses(replica: Replica, tokens: list[Tensor]) -> dict[int, Tensor]:
    """The loss of each microbatch whose last stage is on this rank, the mean over its positions here, without
    gradients."""
    losses = replica.executor.run(replica.evaluation, tokens)
    for state in replica.float8_states:
        state.forget_now()
    return losses


def mean_losses(losses: dict[int, Tensor], job: JobSpec, mesh: Mesh, shares: Sequence[float]) -> list[float | None]:
    """The mean losses over the positions that count, on every rank, from the losses of this rank's microbatches; ranks
    without the last stage give none. `shares` as in `means_of`."""
    return means_of(mesh.numbers_or_ones(loss_totals(losses, mesh, len(shares))), job, shares)


def loss_totals(losses: dict[int, Tensor], mesh: Mesh, num_losses: int) -> Tensor:
    """The sums of the losses over microbatches and replicas, where the host need not wait for them yet."""
    totals = torch.zeros(num_losses, dtype=torch.float64, device=mesh.device)
    for i in sorted(losses):
        totals += losses[i]
    return sum_over_stages_and_replicas(totals, mesh)


def sum_over_stages_and_replicas(totals: Tensor, mesh: Mesh) -> Tensor:
    """Sum numbers in place that one rank of each pipeline has, and that ranks of tp have alike; and return them."""
    all_reduce(totals, mesh.pp)
    return all_reduce(totals, mesh.dp_cp)


def means_of(totals: Sequence[float], job: JobSpec, shares: Sequence[float]) -> list[float | None]:
    """The mean losses over the positions that count, from sums over microbatches and replicas of means over all
    positions: `shares` are the parts of all positions that count; None where none does."""
    count = job.num_microbatches * job.plan.replicas
    return [total / count / share if share else None for total, share in zip(totals, shares, strict=True)]
