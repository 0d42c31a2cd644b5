"""Dry steps of one rank, without values and without other ranks, but with the real build, program and optimizer.

Tensors are on torch's device meta: operators compute only the shapes of their results. Collectives finish at once
(parallel/comm/transport.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Connect, StandIns
from shardwright.parallel.comm.transport import DryTransport
from shardwright.parallel.device_streams import DeviceStreams
from shardwright.schedule.job_program import job_program, steps_to_fill
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.async_step import train_stream
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import evaluate, train_step

META = torch.device("meta")


def _no_values(place: ParameterShard, start: int, out: Tensor) -> None:
    """Write no initial values, since the tensors have no memory."""


class DrySteps:
    """A rank that runs `num_steps` dry steps at a time: one, or enough to fill a pipeline that never drains."""

    def __init__(
        self, job: JobSpec, rank: int, device: str, connect: Connect | None = None, streams: DeviceStreams | None = None
    ) -> None:
        """Build the rank as it would be on a `device`, with no other ranks on its axes. `connect` replaces the
        communicators, which do nothing by default, and `streams` stand for the streams of the device."""
        job = job.grown()
        self._job, self.num_steps = job, steps_to_fill(job)
        connect = connect or (lambda lines: DryTransport(is_gloo=device == "cpu"))
        self.mesh = job_mesh(job, rank, META, stand_ins=StandIns(connect, device, streams))
        self.program = job_program(job, self.num_steps)
        self.replica = build(job, self.mesh, _no_values)
        for unit in (unit for shards in self.replica.shards.values() for unit in shards.units if not unit.is_frozen):
            unit.masters.set_num_steps(1)  # so that the optimizer has its state, as from the second step on
        self.batch_of: Callable[[int], Tensor] = self._zeros
        self._num_done = 0

    def _zeros(self, _: int) -> Tensor:
        job = self._job
        return torch.zeros(
            job.batch.global_batch_size // job.plan.dp, job.model.sequence + 1, dtype=torch.long, device=META
        )

    def run(self) -> None:
        """Run `num_steps` steps, and count in the ledger what they send. Batches go on from the previous call."""
        self.mesh.ledger.clear()
        if self.program.weights == "current":
            train_step(self.replica, 0, self.batch_of(self._num_done))
        else:
            first = self._num_done
            train_stream(self.replica, self.program, 0, lambda n: self.batch_of(first + n))
        self._num_done += self.num_steps

    def evaluate(self) -> None:
        """Compute the loss of a batch, without gradients."""
        evaluate(self.replica, self._zeros(0))
