"""Training without draining the pipeline: each stage updates its own weights while microbatches keep coming.

PipeDream and PipeDream-2BW train so (schedule/generators/pipedream.py, schedule/generators/pipedream_2bw.py). At no
moment have all stages done the same number of updates, so there is no global gradient norm and no clipping.
"""

from collections.abc import Callable

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares
from shardwright.schedule.action import Action
from shardwright.schedule.schedule import Program
from shardwright.train.build import Replica
from shardwright.train.train_step import (
    StepResult,
    counted_shares,
    learning_rate,
    loss_factors,
    mean_losses,
    microbatches,
    numbered,
    without_target,
)


class MicrobatchStream:
    """The microbatches of consecutive global batches, read on demand. The last two batches are kept."""

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
            self._read = {number: self._read[number] for number in sorted(self._read)[-1:]}
            self._read[batch] = microbatches(self._batch_of(batch), self._job.plan.microbatch_size)
        return self._read[batch]


class _CountedBatches:
    """Global batches with the number of their targets that count. Each rank reads batches in order, and all ranks of a
    stage at the same actions, so they can count together."""

    def __init__(self, job: JobSpec, mesh: Mesh, batch_of: Callable[[int], Tensor]) -> None:
        self._job, self._mesh, self._batch_of = job, mesh, batch_of
        self._shares: dict[int, CountedShares] = {}
        self.stream = MicrobatchStream(job, self._read)

    def shares(self, batch: int) -> CountedShares:
        """The shares of a batch's positions that count."""
        if batch not in self._shares:
            self.stream.of_batch(batch)
        return self._shares[batch]

    def _read(self, batch: int) -> Tensor:
        tokens_BS = self._batch_of(batch)
        if batch not in self._shares:
            self._shares[batch] = counted_shares(self._job, self._mesh, tokens_BS)
        return tokens_BS


def train_stream(
    replica: Replica, program: Program, first_step: int, batch_of: Callable[[int], Tensor], left_out: int = 0
) -> list[StepResult]:
    """Run a stream of global batches of one size, drained only at its end. `batch_of(n)` is this replica's part of
    batch n, [B, S + 1], and `left_out` the number of earlier steps that changed no weight.

    Returns a result for each batch, without a gradient norm. All updates of a batch have the same learning rate. A
    batch without targets changes no weight.
    """
    mesh, job = replica.mesh, replica.job.at_step(first_step)
    batch_share = replica.job.batch_share(first_step)
    per_batch = job.num_microbatches
    num_batches = program.num_microbatches // per_batch
    updates_per_batch = per_batch if program.weights == "stashed" else 1
    mean = updates_per_batch / (per_batch * job.plan.replicas)

    def update(action: Action) -> None:
        stage = action.stage
        shards = replica.shards[stage]
        shards.wait()
        if replica.tied.are_both_here:  # plans with the two copies on different ranks are refused
            replica.tied.sum_gradients()
        shards.reduce_late()
        replica.weight_stashes[stage].before_update()
        batch = action.microbatch // per_batch
        if shares(batch).targets[0]:
            shards.update(1.0, rate_of(batch))
        shards.zero()

    for shards in replica.shards.values():
        shards.zero()
    counted_batches = _CountedBatches(job, mesh, batch_of)
    stream = counted_batches.stream
    shares = counted_batches.shares

    def rate_of(batch: int) -> float:
        num_without_target = sum(not shares(number).targets[0] for number in range(batch))
        return learning_rate(job.optimizer, first_step + batch, batch_share, left_out + num_without_target)

    def factors(microbatch: int) -> tuple[float, ...]:
        return loss_factors(job, mean, shares(microbatch // per_batch).targets)

    samples = numbered(job, mesh, first_step, num_batches, loss_factor=mean)
    losses = replica.executor.run(program, stream, update, samples, factors)
    results = []
    for batch in range(num_batches):
        numbers = [i for i in range(batch * per_batch, (batch + 1) * per_batch) if i in losses]
        batch_losses = {i: losses[i] for i in numbers}
        loss, *mtp_losses = mean_losses(batch_losses, job, mesh, shares(batch).targets)
        rate = rate_of(batch)
        result = StepResult(loss, None, rate, mtp_losses=tuple(mtp_losses))
        results.append(without_target(job, rate) if loss is None else result)
    return results
