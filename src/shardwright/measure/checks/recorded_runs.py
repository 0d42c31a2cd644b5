"""The loop, saves and evaluations of a rank on CUDA without a device: order of accesses, and waits of the host."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.config.job import JobSpec
from shardwright.config.plan import layer_policies
from shardwright.config.recompute_policy import KEEP_ALL
from shardwright.measure.checks.dry_loop import DryLoop, loop_job
from shardwright.measure.checks.host_waits import ExpertPasses, expert_passes
from shardwright.measure.checks.recorded_streams import OperatorAccesses, RecordedStreams
from shardwright.parallel.comm.transport import DryTransport
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.data.batch_reader import BatchPlace, BatchReader
from shardwright.train.dry_steps import DrySteps


@dataclass(frozen=True)
class RankAccesses:
    """The run of a rank on CUDA: the number of its accesses to memory, their faults, and the lines at which the host
    waited in `num_steps` steps, with the `passes` of layers that have experts; and those at which it waited for
    measurements, in twice as many steps with `num_lines` progress lines."""

    num_accesses: int
    faults: tuple[str, ...]
    waits: tuple[str, ...]
    num_steps: int
    passes: ExpertPasses
    waits_to_read: tuple[str, ...] = ()
    num_lines: int = 0


def recorded_accesses(job: JobSpec, rank: int) -> RankAccesses:
    """Record the accesses of a rank to its memory on CUDA, while the loop of `train` does as many steps as fill its
    pipeline, twice. A checkpoint is written after the first ones, another during the second; an evaluation follows.
    `waits` are those of the second ones."""
    streams = RecordedStreams()
    with OperatorAccesses(streams):
        connect = streams.connecting(lambda lines: DryTransport(is_gloo=False))
        steps = DrySteps(loop_job(job), rank, "cuda", connect, streams)
        job = job.grown()
        num_batches = 2 * steps.num_steps + 1  # one more batch is read ahead, into the first one's memory
        reader = ReaderInTurn(_ZeroSamples(job.model.sequence), job, steps.mesh, num_batches)
        with DryLoop(steps, reader, streams) as loop:
            loop.go_on(steps.num_steps)
            streams.host_writes_files(SavedState(steps.replica, steps.mesh).copy().wait())
            saved = SavedState(steps.replica, steps.mesh).copy()
            steps.replica.executor.reverses_pairs = True  # on a device neither part of a pair is first
            streams.waits.clear()
            loop.go_on(steps.num_steps)
            waits, passes = tuple(streams.waits), _expert_passes(job, steps)
            streams.host_writes_files(saved.wait())
            steps.evaluate()
    num_lines = 2 * steps.num_steps // loop.job.run.log_every
    faults, to_read = tuple(streams.faults), tuple(loop.waits_to_read)
    return RankAccesses(streams.num_accesses, faults, waits, steps.num_steps, passes, to_read, num_lines)


class ReaderInTurn(BatchReader):
    """Reads a batch at once when it is requested: the earliest moment at which another reader's thread may read it."""

    def _ask(self, place: BatchPlace) -> None:
        self._ahead = place
        self._read.put(self._fetch(place))


@dataclass
class _ZeroSamples:
    """Samples of `sequence` + 1 tokens, of which only the shape is used."""

    sequence: int

    def __len__(self) -> int:
        return 1

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        return np.zeros((count, self.sequence + 1), dtype=np.int64)


def _expert_passes(job: JobSpec, steps: DrySteps) -> ExpertPasses:
    policies = layer_policies(job.plan, job.model.layers, job.model.mtp_layers)
    routers = {stage: list(module.routers()) for stage, module in steps.replica.stages.items()}
    num_recomputed = {stage: sum(policies[layer] != KEEP_ALL for layer in layers) for stage, layers in routers.items()}
    # Layers of a stage see the same tokens; each module of further tokens sees others.
    first_further = job.model.layers
    sights = {stage: {max(layer, first_further - 1) for layer in layers} for stage, layers in routers.items()}
    row = steps.replica.executor.row
    return ExpertPasses(
        expert_passes(row, {stage: len(layers) for stage, layers in routers.items()}, num_recomputed),
        expert_passes(row, {stage: len(sets) for stage, sets in sights.items()}, dict.fromkeys(routers, 0)),
    )
