"""Sentences about the update of a step: its optimizer, its collectives, and the rate's dependence on the batch."""

from collections.abc import Iterator

from shardwright.config.job import JobSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.rate_schedules import RAMP_UP_RULES, RATE_SCHEDULES
from shardwright.config.units import counted, seconds_text
from shardwright.sharding.groups import SHARDS, axis_groups, zero_stage


def update_sentences(job: JobSpec, seconds: float) -> Iterator[str]:
    """Sentences about an update that takes `seconds`."""
    moments = f", with moments in {job.precision.moments}" if job.precision.moments != "float32" else ""
    masters = "" if job.precision.master_number == "float32" else f", which are in {job.precision.compute} alone"
    updates = f"{job.optimizer.facts.title} updates a rank's part of the weights{masters}{moments}"
    yield f"Then {updates}: {seconds_text(seconds)}."
    shards = axis_groups(job.plan, SHARDS[False]).size if zero_stage(job.plan) else 1
    among = " and ".join(
        f"{num_ranks:,} ranks of {axis}" for num_ranks, axis in ((shards, "ZeRO"), (job.plan.tp, "tp")) if num_ranks > 1
    )
    if job.optimizer.facts.matrix_update == "orthogonal":
        yield (
            f"Each matrix of the layers is made orthogonal by its owner among {among}: they send it their rows, and "
            "get those of the step back."
            if among
            else "Each rank makes the matrices of its layers orthogonal."
        )
        yield "Embeddings, head, norms and biases are AdamW's."
    if job.optimizer.facts.matrix_update == "factored" and among:
        yield f"Sums of squares by row and by column of each matrix are added up over {among}."
    yield _rate(job.optimizer)
    yield from _growing(job)


def _rate(optimizer: OptimizerSpec) -> str:
    """The learning rate over a run."""
    peak, floor = optimizer.learning_rate, optimizer.learning_rate * optimizer.min_learning_rate_ratio
    fall = f"falls to {floor:.3g} at the end of {counted(optimizer.steps, 'step')}"
    schedule_text = RATE_SCHEDULES[optimizer.schedule].text(optimizer, f"{floor:.3g}", fall)
    warmup = counted(optimizer.warmup_steps, "step")
    beginning = f"rises to {peak:.3g} in {warmup}" if optimizer.warmup_steps else f"begins at {peak:.3g}"
    return f"The learning rate {beginning} and {schedule_text}."


def _growing(job: JobSpec) -> Iterator[str]:
    """Sentences about the rate under a batch that grows."""
    batch, optimizer = job.batch, job.optimizer
    if not batch.grows and optimizer.batch_rule != "none":
        yield f"It would follow a batch that grows (optimizer.batch_rule {optimizer.batch_rule!r}), and this does not."
    rule = RAMP_UP_RULES[optimizer.batch_rule].text
    if batch.grows:
        yield (
            f"The batch grows from {batch.ramp.start:,} to {batch.global_batch_size:,} sequences over the first "
            f"{counted(batch.num_growing, 'step')}, and this is a step of the full one; the learning rate {rule}"
            + (f", and is {100 * _rate_share(job):.3g} % of its own at first." if _rate_share(job) < 1 else ".")
        )


def _rate_share(job: JobSpec) -> float:
    return RAMP_UP_RULES[job.optimizer.batch_rule].factor(job.batch_share(0))
