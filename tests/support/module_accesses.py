"""The accesses to memory of a rank with a user's own module, recorded as on CUDA."""

from collections.abc import Callable

from torch import Tensor, nn

from shardwright.config.job import JobSpec
from shardwright.measure.checks.host_waits import ExpertPasses
from shardwright.measure.checks.recorded_runs import RankAccesses
from shardwright.measure.checks.recorded_streams import OperatorAccesses, RecordedStreams
from shardwright.parallel.comm.process_groups import StandIns
from shardwright.parallel.comm.transport import DryTransport
from shardwright.parallel.zero.module_units import module_units
from shardwright.train.build import job_mesh
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.dry_steps import META
from shardwright.train.own_module.sharded_module import ShardedModule


def module_accesses(
    job: JobSpec, module: nn.Module, inputs: Callable[[], Tensor], accumulate: int, rank: int
) -> RankAccesses:
    """Record the accesses of a rank to its memory on CUDA with a user's own module, which lies on the device meta and
    returns one tensor: two steps, with a checkpoint after each. `waits` are those of the second step."""
    streams = RecordedStreams()
    with OperatorAccesses(streams):
        connect = streams.connecting(lambda lines: DryTransport(is_gloo=False))
        mesh = job_mesh(job, rank, META, stand_ins=StandIns(connect, "cuda", streams))
        sharded = ShardedModule(module, module_units(module, None), job, mesh, accumulate)
        for _ in range(2):
            streams.waits.clear()
            for _ in range(accumulate):
                sharded.backward(sharded(inputs()).square().mean())
            sharded.step()
            waits = tuple(streams.waits)
            streams.host_writes_files(SavedState(sharded.replica, mesh).held())
    return RankAccesses(streams.num_accesses, tuple(streams.faults), waits, 1, ExpertPasses())
