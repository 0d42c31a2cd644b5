"""The first and the last lines of a run, and its result."""

import math
from dataclasses import dataclass, field

from pydantic import ValidationError

from shardwright.config.batch import BatchSpec
from shardwright.config.data import HELD_OUT
from shardwright.config.job import JobSpec
from shardwright.config.model_job import sequence_notes
from shardwright.config.phrase import below, say
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.action_times import Performed
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, Manifest, optimizer_of
from shardwright.train.data.place import PlaceInData
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.tokenizer import ByteTokenizer
from shardwright.train.metrics import MetricsLog, held_out_of
from shardwright.train.steps_measured import StepsMeasured
from shardwright.train.train_step import learning_rate


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `steps` count from the job's first step. Losses are in nats per token. `first_loss` and
    `last_loss` are of this part of the run, None if it had no step to run. The losses of evaluated sets are by name, as
    last measured; None if no token of a set has a loss.

    `preempted`: the run was asked to stop, has saved a checkpoint and can be resumed. `measured` has this rank's
    measurements of its steps, None without steps. `performed` has the actions of the last measured step and their
    times, by pipeline rank: those of this rank in the first replica, and nothing elsewhere.
    """

    steps: int
    first_loss: float | None
    last_loss: float | None
    validation_losses: dict[str, float | None]
    unigram_losses: dict[str, float | None]
    sample: str
    folder: str
    seconds: float
    preempted: bool = False
    measured: StepsMeasured | None = None
    performed: dict[int, list[Performed]] = field(default_factory=dict)

    @property
    def validation_loss(self) -> float | None:
        """The loss on the text that data.validation_share holds out."""
        return self.validation_losses.get(HELD_OUT)

    @property
    def unigram_loss(self) -> float | None:
        """The loss of a unigram model, which knows no context, on the same text."""
        return self.unigram_losses.get(HELD_OUT)


NOTHING_IS_KEPT = say(
    "note: no checkpoints are kept, and of the weights nothing is left after the run; --set "
    "checkpoint.every_steps=100 keeps them every 100 steps and at the end"
)
_LISTED_RANKS = 64  # more of them are not listed


def rate_note(manifest: Manifest, job: JobSpec, left_out: int) -> str:
    """A line if the learning rate of the next step differs from the rate under the job of the checkpoint; empty if it
    is the same, or if this version can't read the checkpoint's job. `left_out` steps so far changed no weight."""
    step = manifest.step
    if step >= job.optimizer.steps:
        return ""
    try:
        old_optimizer = optimizer_of(manifest)
        batch = BatchSpec.model_validate(manifest.job.get("batch", {}))
    except (BrokenCheckpointError, ValidationError):
        return ""
    old_batch_share = batch.size_at(step) / batch.global_batch_size
    old_rate = learning_rate(old_optimizer, step, old_batch_share, left_out)
    rate = learning_rate(job.optimizer, step, job.batch_share(step), left_out)
    if math.isclose(old_rate, rate, rel_tol=1e-9):
        return ""
    return say(
        "note: the learning rate of step {step} is {rate:.3g}, and would be {old_rate:.3g} under the job of the "
        "checkpoint: it jumps from one to the other there",
        step=step + 1,
        rate=rate,
        old_rate=old_rate,
    )


def _data_line(job: JobSpec, tokens: TokenFiles | MixedTokens) -> str:
    """The line of a run's data and its steps."""
    line = say(
        "{paths}: {documents}, {num_train_tokens:,} tokens to train on, {num_validation_tokens:,} held out; {steps} of "
        "{tokens_per_step:,} tokens",
        paths=tuple(data.path for data in job.data.each),
        documents=counted_phrase(tokens.num_documents, "document"),
        num_train_tokens=tokens.num_train_tokens,
        num_validation_tokens=tokens.num_validation_tokens,
        steps=counted_phrase(job.optimizer.steps, "step"),
        tokens_per_step=job.tokens_per_step,
    )
    if not job.batch.grows:
        return line
    return say("{line}, the first of {tokens:,}", line=line, tokens=job.at_step(0).tokens_per_step)


def introduce(job: JobSpec, mesh: Mesh, tokens: TokenFiles | MixedTokens, place: PlaceInData, log: MetricsLog) -> None:
    """Print the first lines of a run: its model, plan, data and place in the data."""
    model, plan = job.model, job.plan
    log.tell(
        say(
            "{name}: {model}, {layers} x {hidden} hidden, {heads}, {vocab:,} tokens of vocabulary, sequences of "
            "{sequence}",
            name=job.name,
            model=model.name,
            layers=counted_phrase(model.layers, "layer"),
            hidden=model.hidden,
            heads=counted_phrase(model.heads, "head"),
            vocab=model.vocab,
            sequence=model.sequence,
        )
    )
    log.tell(
        say(
            "{ranks} on {type}: {schedule}, {microbatches} of {microbatch_size}, sequence parallel {sequence_parallel}",
            ranks=counted_phrase(plan.world, "rank"),
            type=mesh.device.type,
            schedule=plan.schedule,
            microbatches=counted_phrase(job.num_microbatches, "microbatch"),
            microbatch_size=plan.microbatch_size,
            sequence_parallel=say("on") if plan.sequence_parallel and plan.tp > 1 else say("off"),
        )
    )
    log.tell(below(mesh.shape.lines()[: None if plan.world <= _LISTED_RANKS else 1]))
    log.tell(_data_line(job, tokens))
    for note in sequence_notes(model) if model.sequence > model.longest_sequence else ():
        log.tell(say("note: {note}", note=note))
    if job.data.tokenizer == "bytes" and tokens.largest_id < ByteTokenizer.num_ids <= model.vocab // 4:
        log.tell(
            say(
                "note: text is read as bytes, {num_ids} of the {vocab:,} tokens of the vocabulary (data.tokenizer "
                "names a tokenizer)",
                num_ids=ByteTokenizer.num_ids,
                vocab=model.vocab,
            )
        )
    for line in place.described(job.batch.samples_before(job.optimizer.steps)):
        log.tell(line)
    if tokens.dropped_share:
        log.tell(
            say(
                "the tokenizer has no token for {dropped_share:.2%} of the text's characters, and drops them",
                dropped_share=tokens.dropped_share,
            )
        )


def conclude(run: RunResult, log: MetricsLog, keeps: bool) -> None:
    """Print the last lines of a run: its losses, its sample and its files. `keeps`: it has written checkpoints."""
    for name, loss in run.validation_losses.items():
        unigram = run.unigram_losses.get(name)
        if loss is not None and unigram is not None:
            log.tell(
                say(
                    "{held_out} {loss:.4f} nats a token after {steps}; a unigram model of the same text has "
                    "{unigram:.4f}",
                    held_out=held_out_of(name),
                    loss=loss,
                    steps=counted_phrase(run.steps, "step"),
                    unigram=unigram,
                )
            )
    if run.sample:
        sample = "\n".join("  | " + line for line in run.sample.splitlines())
        log.tell(say("a sample of what it writes:\n{sample}", sample=sample))
    if not keeps:
        log.tell(say("no checkpoints were kept: of the weights nothing is left (checkpoint.every_steps keeps them)"))
    log.tell(
        say(
            "{seconds:.0f} s; metrics in {folder}/metrics.jsonl and {folder}/tensorboard",
            seconds=run.seconds,
            folder=run.folder,
        )
    )
