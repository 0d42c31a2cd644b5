"""Training without draining the pipeline: each stage updates its own weights while microbatches keep coming.

What PipeDream and PipeDream-2BW do (schedule/generators/pipedream.py, schedule/generators/pipedream_2bw.py). There is
no moment at which all stages have the same number of updates, so there is no global gradient norm, and nothing is
clipped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares
from shardwright.parallel.pipeline.executor import SampleNumbers
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.schedule.action import Action
from shardwright.schedule.schedule import Program
from shardwright.train.build import Replica
from shardwright.train.learning_rate import learning_rate
from shardwright.train.train_step import (
    StepResult,
    counted_shares,
    loss_factors,
    mean_losses,
    microbatches,
    numbered,
)


class MicrobatchStream:
    """The microbatches of consecutive global batches, read when they are asked for. The last two batches are kept."""

    def __init__(self, job: JobSpec, batch_of: Callable[[int], Tensor]) -> None:
        self._job = job
        self._batch_of = batch_of
        self._read: dict[int, list[Tensor]] = {}

    def __getitem__(self, index: int, /) -> Tensor:
        batch, i = divmod(index, self._job.num_microbatches)
        return self.of_batch(batch)[i]

    def of_batch(self, batch: int) -> list[Tensor]:
        """The microbatches of one global batch."""
        if batch not in self._read:
            self._read = {kept: self._read[kept] for kept in sorted(self._read)[-1:]}
            self._read[batch] = microbatches(self._batch_of(batch), self._job.plan.microbatch_size)
        return self._read[batch]


@dataclass(frozen=True)
class _OfRealTokens:
    """Microbatches whose losses within the model are divided by the share of real tokens in their batch, which is asked
    for when they are."""

    samples: SampleNumbers
    share_of: Callable[[int], float]

    def __getitem__(self, index: int, /) -> Microbatch:
        sample = self.samples[index]
        return replace(sample, loss_factor=sample.loss_factor / self.share_of(index))


def train_stream(
    job: JobSpec, replica: Replica, mesh: Mesh, program: Program, first_step: int, batch_of: Callable[[int], Tensor]
) -> list[StepResult]:
    """Run a stream of global batches of one size, drained only at its end. `batch_of(n)` is this replica's n-th,
    [B, S + 1].

    Returns a result for each batch; its gradient norm is None. A batch's learning rate holds for all its updates.
    """
    batch_share, job = job.batch_share(first_step), job.at_step(first_step)
    per_batch = job.num_microbatches
    num_batches = program.num_microbatches // per_batch
    updates_per_batch = per_batch if program.weights == "stashed" else 1
    mean = updates_per_batch / (per_batch * job.plan.replicas)

    def update(action: Action) -> None:
        stage = action.stage
        shards = replica.shards[stage]
        shards.wait()
        if replica.tied.are_both_here:  # on one rank alone; between two, the plan is refused
            replica.tied.sum_gradients()
        shards.reduce_late()
        replica.weight_stashes[stage].before_update()
        shards.update(1.0, learning_rate(job.optimizer, first_step + action.microbatch // per_batch, batch_share))
        shards.zero()

    for shards in replica.shards.values():
        shards.zero()
    stream = MicrobatchStream(job, batch_of)
    found: dict[int, CountedShares] = {}

    def shares(batch: int) -> CountedShares:
        # Asked for by the ranks of the last stage, and of stages whose routers have losses: by all ranks of a stage in
        # the same order.
        if batch not in found:
            found[batch] = counted_shares(job, mesh, torch.cat(stream.of_batch(batch)))
        return found[batch]

    def factors(microbatch: int) -> tuple[float, ...]:
        return loss_factors(job, mean, shares(microbatch // per_batch).targets)

    samples: SampleNumbers = numbered(job, mesh, first_step, num_batches, loss_factor=mean)
    if job.data.separate_documents and job.model.has_router_losses:
        samples = _OfRealTokens(samples, lambda microbatch: shares(microbatch // per_batch).real)
    losses = replica.executor.run(program, stream, update, samples, factors)
    results = []
    for batch in range(num_batches):
        numbers = [i for i in range(batch * per_batch, (batch + 1) * per_batch) if i in losses]
        mine = {i: losses[i] / losses[i].new_tensor(shares(batch).targets) for i in numbers}
        step = first_step + batch
        loss, *further = mean_losses(mine, job, mesh, (1.0,) * (1 + job.model.mtp_layers))
        rate = learning_rate(job.optimizer, step, batch_share)
        results.append(StepResult(loss, None, rate, mtp_losses=tuple(further)))
    return results
