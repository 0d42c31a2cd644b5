"""The loss on text that is held out: the sum of the losses of its tokens over how many have one, each sample once.

So it is a number of the weights and the text alone, whatever the batch, the plan, and how many targets samples have.
"""

import math
from collections.abc import Collection, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from shardwright.config.data import HELD_OUT
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import counts
from shardwright.train.build import Replica
from shardwright.train.checkpoint.manifest import MeasuredLoss
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.data.once_each import OnceEach, unigram_loss
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.samples import SampleReader
from shardwright.train.train_step import microbatch_losses, microbatches

_DIGESTED = 64  # samples of a set that its digest is of


class HeldOutSets:
    """All sets that a run evaluates, by their names, and their losses as last measured, after `step` steps."""

    def __init__(self, job: JobSpec, tokens: TokenFiles | MixedTokens, own: Mapping[str, TokenFiles]) -> None:
        """`own` are the sets of data.validation."""
        self._job, self._tokens = job, tokens
        share = tokens.validation_samples()
        self.readers = ({} if share is None else {HELD_OUT: share}) | {
            name: one.in_file_order() for name, one in own.items()
        }
        self.losses: dict[str, float | None] = {}
        self.step = -1
        self._digests: dict[str, str] = {}

    def measure(self, replica: Replica, mesh: Mesh, step: int, names: Collection[str]) -> dict[str, float | None]:
        """Measure the losses of some sets after so many steps. Returns them. Every rank calls this."""
        if step != self.step:
            self.step, self.losses = step, {}
        new = {name: held_out_loss(self._job, replica, mesh, self.readers[name]) for name in names}
        self.losses |= new
        return new

    def to_store(self, step: int) -> dict[str, MeasuredLoss]:
        """The losses that are numbers, for a checkpoint after so many steps."""
        if step != self.step:
            return {}
        return {
            name: MeasuredLoss(loss=loss, set_digest=self._digest(name))
            for name, loss in self.losses.items()
            if loss is not None and math.isfinite(loss)
        }

    def _digest(self, name: str) -> str:
        """32 characters that tell apart what an evaluation takes of a set: how many samples, and some of them."""
        if name not in self._digests:
            reader = self.readers[name]
            taken = min(len(reader), most_samples(self._job))
            digest = blake2b(f"{taken} x {reader.sequence}".encode(), digest_size=16)
            for place in range(min(taken, _DIGESTED)):
                digest.update(reader.batch(place * taken // min(taken, _DIGESTED), 1).astype("<i8").tobytes())
            self._digests[name] = digest.hexdigest()
        return self._digests[name]

    def worst(self, step: int) -> float | None:
        """A loss after so many steps that is no number, if there is one, or else any; None where none was measured."""
        losses = [loss for loss in self.losses.values() if loss is not None] if step == self.step else []
        return next((loss for loss in losses if not math.isfinite(loss)), losses[0] if losses else None)

    def notes(self) -> list[str]:
        """Lines on sets of which evaluations take only a part."""
        return list(filter(None, (part_note(self._job, reader, name) for name, reader in self.readers.items())))

    def baselines(self) -> dict[str, float | None]:
        """The loss of a model that knows no context, on each set, over the same targets. To read all the text takes
        long."""
        if not self.readers:
            return {}
        job = self._job
        shares, marks = self._tokens.token_shares(job.model.vocab), job.data.separate_documents
        return {name: unigram_loss(shares, one, most_samples(job), marks) for name, one in self.readers.items()}


def most_samples(job: JobSpec) -> int:
    """Samples of one evaluation at most."""
    return job.run.eval_batches * job.batch.global_batch_size


def part_note(job: JobSpec, samples: SampleReader, name: str = HELD_OUT) -> str:
    """A line where an evaluation takes only a part of a set; else an empty one."""
    most, held = most_samples(job), len(samples)
    if held <= most:
        return ""
    needed = -(-held // job.batch.global_batch_size)
    which = "held-out sequences" if name == HELD_OUT else f"sequences of {name}"
    return (
        f"note: evaluations take the first {most:,} of {held:,} {which} (run.eval_batches "
        f"{job.run.eval_batches} x {job.batch.global_batch_size}); run.eval_batches = {needed} takes all"
    )


def held_out_loss(job: JobSpec, replica: Replica, mesh: Mesh, samples: SampleReader) -> float | None:
    """The loss in nats a token over the first run.eval_batches global batches of samples, or all if there are fewer,
    each once; the same number on every rank, and None where no target has a loss.

    Without gradients. Moves what forward passes do, and two small all-reduces.
    """
    job, size = job.grown(), job.batch.global_batch_size
    once = OnceEach(samples, most_samples(job), job.plan.microbatch_size, size)
    per_batch, per_replica = size // job.plan.microbatch_size, job.num_microbatches
    total_2 = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of losses, and of targets that have one
    with BatchReader(once, job, mesh, once.num_batches) as batches:
        for number in range(once.num_batches):
            first = number * per_batch + mesh.dp.index * per_replica
            weights = once.weights[first : first + per_replica].tolist()
            total_2 += _summed(job, replica, batches.batch(number, number * size), weights)
    all_reduce(total_2, mesh.pp)
    all_reduce(total_2, mesh.dp_cp)
    if total_2.is_meta:  # a dry run has no numbers
        return None
    loss, count = mesh.numbers(total_2)
    return loss / count if count else None


def _summed(job: JobSpec, replica: Replica, tokens_BT: Tensor, weights: list[float]) -> Tensor:
    """The losses of a replica's part of a global batch, summed over the positions of this rank, and how many of these
    count, [2], where the microbatches have these weights: of those whose last stage is here."""
    parts = microbatches(tokens_BT, job.plan.microbatch_size)
    total_2 = torch.zeros(2, dtype=torch.float64, device=tokens_BT.device)
    for index, loss in sorted(microbatch_losses(replica, parts).items()):
        inputs_BS = parts[index][:, :-1]
        num_counted = counts(parts[index], 1).sum() if job.data.separate_documents else inputs_BS.numel()
        # The loss is the mean over the positions that this rank holds; all ranks of cp count the same targets.
        total_2[0] += loss.double() * (inputs_BS.numel() / job.plan.cp * weights[index])
        total_2[1] += num_counted * (weights[index] / job.plan.cp)
    return total_2
