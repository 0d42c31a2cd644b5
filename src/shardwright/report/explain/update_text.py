"""Sentences about the update of a step: its optimizer, its collectives, and the rate's dependence on the batch."""

from collections.abc import Iterator

from shardwright.config.job import JobSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.phrase import both, fixed, say
from shardwright.config.rate_schedules import RAMP_UP_RULES, RATE_SCHEDULES
from shardwright.config.units import counted_phrase, seconds_text
from shardwright.sharding.groups import SHARDS, axis_groups, zero_stage


def update_sentences(job: JobSpec, seconds: float) -> Iterator[str]:
    """Sentences about an update that takes `seconds`."""
    moments = masters = ""
    if job.precision.moments != "float32":
        moments = say(", with moments in {number}", number=job.precision.moments)
    if job.precision.master_number != "float32":
        masters = say(", which are in {number} alone", number=job.precision.compute)
    yield say(
        "Then {optimizer} updates a rank's part of the weights{masters}{moments}: {seconds}.",
        optimizer=job.optimizer.facts.title,
        masters=masters,
        moments=moments,
        seconds=seconds_text(seconds),
    )
    shards = axis_groups(job.plan, SHARDS[False]).size if zero_stage(job.plan) else 1
    holders: list[str] = [
        say("{ranks:,} ranks of {axis}", ranks=num_ranks, axis=axis)
        for num_ranks, axis in ((shards, "ZeRO"), (job.plan.tp, "tp"))
        if num_ranks > 1
    ]
    among = both(holders) if holders else ""
    if job.optimizer.facts.matrix_update == "orthogonal":
        yield (
            say(
                "Each matrix of the layers is made orthogonal by its owner among {ranks}: they send it their rows, and "
                "get those of the step back.",
                ranks=among,
            )
            if among
            else say("Each rank makes the matrices of its layers orthogonal.")
        )
        yield say("Embeddings, head, norms and biases are AdamW's.")
    if job.optimizer.facts.matrix_update == "factored" and among:
        yield say("Sums of squares by row and by column of each matrix are added up over {ranks}.", ranks=among)
    yield _rate(job.optimizer)
    yield from _growing(job)


def _rate(optimizer: OptimizerSpec) -> str:
    """The learning rate over a run."""
    peak, floor = optimizer.learning_rate, optimizer.learning_rate * optimizer.min_learning_rate_ratio
    fall = say(
        "falls to {floor} at the end of {steps}", floor=f"{floor:.3g}", steps=counted_phrase(optimizer.steps, "step")
    )
    schedule_text = RATE_SCHEDULES[optimizer.schedule].text(optimizer, f"{floor:.3g}", fall)
    beginning = say("begins at {peak}", peak=f"{peak:.3g}")
    if optimizer.warmup_steps:
        warmup = counted_phrase(optimizer.warmup_steps, "step")
        beginning = say("rises to {peak} in {steps}", peak=f"{peak:.3g}", steps=warmup)
    return say("The learning rate {beginning} and {schedule}.", beginning=beginning, schedule=schedule_text)


def _growing(job: JobSpec) -> Iterator[str]:
    """Sentences about the rate under a batch that grows."""
    batch, optimizer = job.batch, job.optimizer
    if not batch.grows and optimizer.batch_rule != "none":
        yield say(
            "It would follow a batch that grows (optimizer.batch_rule {rule}), and this does not.",
            rule=repr(optimizer.batch_rule),
        )
    rule = RAMP_UP_RULES[optimizer.batch_rule].text
    if batch.grows:
        share = _rate_share(job)
        at_first = say(", and is {share:.3g} % of its own at first", share=100 * share) if share < 1 else ""
        yield say(
            "The batch grows from {start:,} to {size:,} sequences over the first {steps}, and this is a step of the "
            "full one; the learning rate {rule}{at_first}.",
            start=batch.ramp.start,
            size=batch.global_batch_size,
            steps=counted_phrase(batch.num_growing, "step"),
            rule=fixed(rule),
            at_first=at_first,
        )


def _rate_share(job: JobSpec) -> float:
    return RAMP_UP_RULES[job.optimizer.batch_rule].factor(job.batch_share(0))
