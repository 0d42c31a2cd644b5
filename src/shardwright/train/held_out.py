"""The loss on held-out text: the sum of its tokens' losses divided by the number of tokens with a loss, each sample
once.

So the loss depends on the weights and the text alone, and not on the batch, the plan or the number of targets in a
sample.
"""

import math
from collections.abc import Collection, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from shardwright.config.data import HELD_OUT
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.parallel.context.document_mask import has_target
from shardwright.train.build import Replica
from shardwright.train.checkpoint.manifest import MeasuredLoss
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.data.once_each import OnceEach, unigram_loss
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.samples import SampleReader
from shardwright.train.train_step import microbatch_losses, microbatches, sum_over_stages_and_replicas

_DIGESTED = 64  # samples of a set that its digest reads


class HeldOutSets:
    """All sets that a run evaluates, by name, and their losses as last measured, after `step` steps."""

    def __init__(
        self, job: JobSpec, tokens: TokenFiles | MixedTokens, validation_sets: Mapping[str, TokenFiles]
    ) -> None:
        """`validation_sets` are the sets of data.validation, by name."""
        self._job, self._tokens = job, tokens
        held_out_samples = tokens.validation_samples()
        self.readers = ({} if held_out_samples is None else {HELD_OUT: held_out_samples}) | {
            name: files.in_file_order() for name, files in validation_sets.items()
        }
        self.losses: dict[str, float | None] = {}
        self.step = -1
        self._digests: dict[str, str] = {}

    def measure(self, replica: Replica, step: int, names: Collection[str]) -> dict[str, float | None]:
        """Measure the losses of the named sets after `step` steps. Returns them. Every rank calls this."""
        if step != self.step:
            self.step, self.losses = step, {}
        losses = {name: held_out_loss(replica, self.readers[name]) for name in names}
        self.losses |= losses
        return losses

    def to_store(self, step: int) -> dict[str, MeasuredLoss]:
        """The finite losses, for a checkpoint after `step` steps."""
        if step != self.step:
            return {}
        return {
            name: MeasuredLoss(loss=loss, set_digest=self._digest(name))
            for name, loss in self.losses.items()
            if loss is not None and math.isfinite(loss)
        }

    def _digest(self, name: str) -> str:
        """32 characters that identify the samples of a set that an evaluation reads: their number, and some of them."""
        if name not in self._digests:
            reader = self.readers[name]
            num_samples = min(len(reader), most_samples(self._job))
            digest = blake2b(f"{num_samples} x {reader.sequence}".encode(), digest_size=16)
            num_digested = min(num_samples, _DIGESTED)
            for index in range(num_digested):
                digest.update(reader.batch(index * num_samples // num_digested, 1).astype("<i8").tobytes())
            self._digests[name] = digest.hexdigest()
        return self._digests[name]

    def worst(self, step: int) -> float | None:
        """A loss after `step` steps that is not finite, if there is one, or else any loss; None if none was
        measured."""
        losses = [loss for loss in self.losses.values() if loss is not None] if step == self.step else []
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0] if losses else None)

    def notes(self) -> list[str]:
        """Lines about sets of which evaluations read only a part."""
        return list(filter(None, (part_note(self._job, reader, name) for name, reader in self.readers.items())))

    def baselines(self) -> dict[str, float | None]:
        """The loss of a unigram model, which knows no context, on each set, over the same targets. This reads all of
        the text, which takes long."""
        if not self.readers:
            return {}
        job = self._job
        shares, marks = self._tokens.token_shares(job.model.vocab), job.data.separate_documents
        return {name: unigram_loss(shares, reader, most_samples(job), marks) for name, reader in self.readers.items()}


def most_samples(job: JobSpec) -> int:
    """The largest number of samples in one evaluation of a set."""
    return job.run.eval_batches * job.batch.global_batch_size


def part_note(job: JobSpec, samples: SampleReader, name: str = HELD_OUT) -> str:
    """A line if an evaluation reads only a part of a set; else an empty string."""
    most, num_samples = most_samples(job), len(samples)
    if num_samples <= most:
        return ""
    num_batches = -(-num_samples // job.batch.global_batch_size)
    set_text = say("held-out sequences") if name == HELD_OUT else say("sequences of {name}", name=name)
    return say(
        "note: evaluations take the first {most:,} of {num_samples:,} {set_text} (run.eval_batches {eval_batches} x "
        "{global_batch_size}); run.eval_batches = {num_batches} takes all",
        most=most,
        num_samples=num_samples,
        set_text=set_text,
        eval_batches=job.run.eval_batches,
        global_batch_size=job.batch.global_batch_size,
        num_batches=num_batches,
    )


def held_out_loss(replica: Replica, samples: SampleReader) -> float | None:
    """The loss in nats per token over the first run.eval_batches global batches of samples, or all if there are fewer,
    each sample once; the same number on every rank, and None if no target has a loss.

    Computes no gradients. Moves the messages of forward passes, and two small all-reduces.
    """
    job, mesh = replica.job.grown(), replica.mesh
    size = job.batch.global_batch_size
    samples_once = OnceEach(samples, most_samples(job), job.plan.microbatch_size, size)
    per_batch, per_replica = size // job.plan.microbatch_size, job.num_microbatches
    total_2 = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of losses, and of targets with a loss
    with BatchReader(samples_once, job, mesh, samples_once.num_batches) as batches:
        for number in range(samples_once.num_batches):
            first = number * per_batch + mesh.dp.index * per_replica
            weights = samples_once.weights[first : first + per_replica].tolist()
            total_2 += _sum_and_count(replica, batches.batch(number, number * size), weights)
    sum_over_stages_and_replicas(total_2, mesh)
    if total_2.is_meta:  # a dry run has no numbers
        return None
    loss, count = mesh.numbers(total_2)
    return loss / count if count else None


def _sum_and_count(replica: Replica, tokens_BT: Tensor, weights: list[float]) -> Tensor:
    """The sum of the losses of a replica's part of a global batch, and the number of targets that count, [2]: over the
    positions of this rank, weighted by microbatch; zeros if the last stage is on another rank."""
    job = replica.job
    parts = microbatches(tokens_BT, job.plan.microbatch_size)
    total_2 = torch.zeros(2, dtype=torch.float64, device=tokens_BT.device)
    for index, loss in sorted(microbatch_losses(replica, parts).items()):
        inputs_BS = parts[index][:, :-1]
        num_counted = has_target(parts[index], 1).sum() if job.data.separate_documents else inputs_BS.numel()
        # The loss is a mean over the positions of this rank; all cp ranks count the same targets.
        total_2[0] += loss.double() * (inputs_BS.numel() / job.plan.cp * weights[index])
        total_2[1] += num_counted * (weights[index] / job.plan.cp)
    return total_2
