"""The loss on text that is held out: the sum of the losses of its tokens over how many have one, each sample once.

So it is a number of the weights and the text alone, whatever the batch, the plan, and how many targets samples have.
"""

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import counts
from shardwright.train.build import Replica
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.data.once_each import OnceEach
from shardwright.train.data.samples import SampleReader
from shardwright.train.train_step import microbatch_losses, microbatches


def most_samples(job: JobSpec) -> int:
    """Samples of one evaluation at most."""
    return job.run.eval_batches * job.batch.global_batch_size


def part_note(job: JobSpec, samples: SampleReader) -> str:
    """A line where an evaluation takes only a part of the samples; else an empty one."""
    most, held = most_samples(job), len(samples)
    if held <= most:
        return ""
    needed = -(-held // job.batch.global_batch_size)
    return (
        f"note: evaluations take the first {most:,} of {held:,} held-out sequences (run.eval_batches "
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
