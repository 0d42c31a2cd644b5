"""Training without draining the pipeline: each stage updates its own weights while microbatches keep coming.

What PipeDream and PipeDream-2BW do (schedule/generators/pipedream.py, schedule/generators/pipedream_2bw.py). There is
no moment at which all stages have the same number of updates, so there is no global gradient norm, and nothing is
clipped.
"""

from collections.abc import Callable

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares
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
    without_target,
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


class _CountedBatches:
    """Global batches of which it is known how many targets count: each rank reads them in their order, and the ranks of
    a stage at the same actions, so they count them together."""

    def __init__(self, job: JobSpec, mesh: Mesh, batch_of: Callable[[int], Tensor]) -> None:
        self._job, self._mesh, self._batch_of = job, mesh, batch_of
        self._known: dict[int, CountedShares] = {}
        self.stream = MicrobatchStream(job, self._read)

    def shares(self, batch: int) -> CountedShares:
        """The shares of the positions of a batch that count."""
        if batch not in self._known:
            self.stream.of_batch(batch)
        return self._known[batch]

    def _read(self, batch: int) -> Tensor:
        tokens_BS = self._batch_of(batch)
        if batch not in self._known:
            self._known[batch] = counted_shares(self._job, self._mesh, tokens_BS)
        return tokens_BS


def train_stream(
    job: JobSpec, replica: Replica, mesh: Mesh, program: Program, first_step: int, batch_of: Callable[[int], Tensor],
    left_out: int = 0,
) -> list[StepResult]:  # fmt: skip
    """Run a stream of global batches of one size, drained only at its end. `batch_of(n)` is this replica's n-th,
    [B, S + 1], and `left_out` are the steps before that changed no weight.

    Returns a result for each batch; its gradient norm is None. A batch's learning rate holds for all its updates. One
    that has no target changes no weight.
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
        batch = action.microbatch // per_batch
        if shares(batch).targets[0]:
            shards.update(1.0, rate_of(batch))
        shards.zero()

    for shards in replica.shards.values():
        shards.zero()
    counted = _CountedBatches(job, mesh, batch_of)
    stream = counted.stream
    shares = counted.shares

    def rate_of(batch: int) -> float:
        before = sum(not shares(earlier).targets[0] for earlier in range(batch))
        return learning_rate(job.optimizer, first_step + batch, batch_share, left_out + before)

    def factors(microbatch: int) -> tuple[float, ...]:
        return loss_factors(job, mean, shares(microbatch // per_batch).targets)

    samples = numbered(job, mesh, first_step, num_batches, loss_factor=mean)
    losses = replica.executor.run(program, stream, update, samples, factors)
    results = []
    for batch in range(num_batches):
        numbers = [i for i in range(batch * per_batch, (batch + 1) * per_batch) if i in losses]
        mine = {i: losses[i] for i in numbers}
        loss, *further = mean_losses(mine, job, mesh, shares(batch).targets)
        rate = rate_of(batch)
        result = StepResult(loss, None, rate, mtp_losses=tuple(further))
        results.append(without_target(job, rate) if loss is None else result)
    return results
