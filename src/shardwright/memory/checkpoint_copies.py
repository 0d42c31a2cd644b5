"""The host memory of a checkpoint: a rank copies its share of the state to the host before a thread writes it.

The copies live until they are written, and one checkpoint is written at a time (train/checkpoint/writing.py). On CUDA
they are pinned, at their own size (parallel/pinned_memory.py).
"""

from collections.abc import Mapping

from shardwright.config.job import JobSpec
from shardwright.config.units import FLOAT32_BYTES
from shardwright.memory.persistent_buffers import error_bytes
from shardwright.memory.rank_state import StageState, UnitState, rank_state
from shardwright.schedule.job_program import job_program
from shardwright.sharding.optimizer_state import moment_bytes


def most_copied_bytes(job: JobSpec) -> int:
    """Bytes of host memory, at most, that a checkpoint takes on any rank of a job; 0 if the job keeps none."""
    if not job.checkpoint.is_on:
        return 0
    program = job_program(job)
    return max(copied_bytes(job, rank_state(job, program, rank)) for rank in range(job.plan.pp))


def copied_bytes(job: JobSpec, states: Mapping[int, StageState]) -> int:
    """Bytes, at most, that a rank with these stages copies: the weights that are updated, the optimizer's state, and
    errors of compression. Ranks that hold the same rows each copy a part of them, to within a row of each parameter.
    The few numbers of routers and fp8 histories are not counted."""
    units = [unit for stage in states.values() for unit in stage.units if not unit.is_frozen]
    factors = sum(group.state_bytes for stage in states.values() for group in stage.updates)
    return factors + sum(_unit_bytes(job, unit) + error_bytes(job, unit) for unit in units)


def _unit_bytes(job: JobSpec, unit: UnitState) -> int:
    replicas = unit.replicas
    num_held = unit.layout.shard_size if replicas.zero else unit.layout.size
    num_writers = replicas.num_copies * (1 if replicas.zero else replicas.num_ranks)
    num_rounded = sum(place.shape[-1] if len(place.shape) > 1 else 1 for place in unit.places) if num_writers > 1 else 0
    num_copied = min(num_held, -(-num_held // num_writers) + num_rounded)
    master_bytes = FLOAT32_BYTES if unit.is_exact else job.precision.master_bytes
    return num_copied * (master_bytes + moment_bytes(job.optimizer, job.precision, unit.by_matrix))
