"""Training without draining the pipeline: each stage updates its own weights while microbatches keep coming.

PipeDream and PipeDream-2BW train so (schedule/generators/pipedream.py, schedule/generators/pipedream_2bw.py). At no
moment have all stages done the same number of updates, so there is no global gradient norm and no clipping.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import CountedShares
from shardwright.schedule.action import Action
from shardwright.schedule.schedule import Program
from shardwright.train.build import Replica
from shardwright.train.train_step import (
    StepResult,
    Votes,
    counted_shares,
    learning_rate,
    loss_factors,
    loss_totals,
    means_of,
    microbatches,
    numbered_microbatches,
    without_target,
)


class _Batches:
    """Consecutive global batches on one rank, read on demand: their microbatches, of the last two batches, and the
    number of their targets that count. Each rank reads batches in order, and all ranks of a stage at the same actions,
    so they can count together."""

    def __init__(self, job: JobSpec, mesh: Mesh, batch_of: Callable[[int], Tensor]) -> None:
        self._job, self._mesh, self._batch_of = job, mesh, batch_of
        self._read: dict[int, list[Tensor]] = {}
        self._shares: dict[int, CountedShares] = {}

    def __getitem__(self, index: int, /) -> Tensor:
        batch, i = divmod(index, self._job.num_microbatches)
        return self._of(batch)[i]

    def _of(self, batch: int) -> list[Tensor]:
        if batch not in self._read:
            self._read = {number: self._read[number] for number in sorted(self._read)[-1:]}
            tokens_BS = self._batch_of(batch)
            if batch not in self._shares:
                self._shares[batch] = counted_shares(self._job, self._mesh, tokens_BS)
            self._read[batch] = microbatches(tokens_BS, self._job.plan.microbatch_size)
        return self._read[batch]

    def shares(self, batch: int) -> Sequence[float]:
        """The shares of a batch's positions that count."""
        if batch not in self._shares:
            self._of(batch)
        return self._shares[batch].targets


def train_stream(
    replica: Replica,
    program: Program,
    first_step: int,
    batch_of: Callable[[int], Tensor],
    left_out: int = 0,
    votes: Votes | None = None,
) -> list[StepResult]:
    """Run a stream of global batches of one size, drained only at its end. `batch_of(n)` is this replica's part of
    batch n, [B, S + 1], and `left_out` the number of earlier steps that changed no weight. `votes` are cast at the end,
    and the last result has them.

    Returns a result for each batch, without a gradient norm. All updates of a batch have the same learning rate. A
    batch without targets changes no weight.
    """
    job = replica.job.at_step(first_step)
    per_batch, batches = job.num_microbatches, _Batches(job, replica.mesh, batch_of)
    updates_per_batch = per_batch if program.weights == "stashed" else 1
    mean = updates_per_batch / (per_batch * job.plan.replicas)

    def rate_of(batch: int) -> float:
        num_without_target = sum(not batches.shares(number)[0] for number in range(batch))
        share = replica.job.batch_share(first_step)
        return learning_rate(job.optimizer, first_step + batch, share, left_out + num_without_target)

    def update(action: Action) -> None:
        batch = action.microbatch // per_batch
        _update(replica, action.stage, rate_of(batch) if batches.shares(batch)[0] else None)

    def factors(microbatch: int) -> tuple[float, ...]:
        return loss_factors(job, mean, batches.shares(microbatch // per_batch))

    for shards in replica.shards.values():
        shards.clear_gradients()
    num_batches = program.num_microbatches // per_batch
    samples = numbered_microbatches(job, replica.mesh, first_step, num_batches, loss_factor=mean)
    losses = replica.executor.run(program, batches, update, samples, factors)
    all_shares = [batches.shares(batch) for batch in range(num_batches)]
    all_losses, cast = _read_losses(job, replica.mesh, losses, all_shares, votes)
    results = []
    for batch, (loss, *mtp_losses) in enumerate(all_losses):
        result = StepResult(loss, None, rate_of(batch), mtp_losses=tuple(mtp_losses))
        results.append(without_target(job, rate_of(batch)) if loss is None else result)
    return [*results[:-1], replace(results[-1], votes=cast)]


def _read_losses(
    job: JobSpec, mesh: Mesh, losses: dict[int, Tensor], shares: Sequence[Sequence[float]], votes: Votes | None
) -> tuple[list[list[float | None]], tuple[float, ...]]:
    """The mean losses of each batch, of whose positions such `shares` count, and the votes. The host waits once."""
    totals = [
        loss_totals({i: loss for i, loss in losses.items() if i // job.num_microbatches == batch}, mesh, len(counted))
        for batch, counted in enumerate(shares)
    ]
    cast = votes() if votes is not None else torch.zeros(0, dtype=torch.float64, device=mesh.device)
    numbers = iter(mesh.numbers_or_ones(torch.cat([*totals, cast])))
    means = [means_of([next(numbers) for _ in counted], job, counted) for counted in shares]
    return means, tuple(numbers)


def _update(replica: Replica, stage: int, rate: float | None) -> None:
    """Update the weights of a stage with its gradients so far; without a rate, only drop the gradients."""
    shards = replica.shards[stage]
    shards.wait()
    if replica.tied.are_both_here:  # plans with the two copies on different ranks are refused
        replica.tied.sum_gradients()
    shards.reduce_late()
    replica.weight_stashes[stage].before_update()
    if rate is not None:
        shards.update(1.0, rate)
    shards.clear_gradients()
