"""The memory account of a job: the bytes that each pipeline rank will hold, by kind, before it runs.

Parameters, gradients and optimizer state are exact to the byte, padding included (Rajbhandari et al. 2020, arXiv
1910.02054, section 3.1: with 16-bit numbers and Adam 16 bytes a parameter, a part of which ZeRO shards, as in
sharding/zero_events.py). Activations are the tensors that autograd keeps of all microbatches in flight, and working
memory is the memory that operators need besides at the peak.
"""

from collections.abc import Sequence

from shardwright.config.job import JobSpec
from shardwright.memory.activation_peak import activation_bytes
from shardwright.memory.persistent_buffers import kept_bytes
from shardwright.memory.rank_state import UnitState, rank_state
from shardwright.memory.zero_replay import replay
from shardwright.schedule.job_program import job_program, steps_to_fill
from shardwright.schedule.lowering.weight_versions import stashed_versions
from shardwright.schedule.schedule import Program
from shardwright.sharding.buckets import num_hosted
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.optimizer_state import moment_bytes

_FLOAT = 4  # bytes of a master weight, and of a gradient on the host


def job_memory(job: JobSpec, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """Memory accounts of all pipeline ranks, or of `ranks`. Each is of the tensor-parallel rank with index 0, which
    holds most: it has the larger share of every split."""
    program = job_program(job, steps_to_fill(job))
    return [rank_memory(job, program, rank) for rank in (range(job.plan.pp) if ranks is None else ranks)]


def rank_memory(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> RankMemory:
    """The account of one rank that runs its list of `program`."""
    states = rank_state(job, program, pp_rank, tp_index)
    versions = stashed_versions(program)[pp_rank]
    own_gradient = job.precision.gradient_bytes * sum(stage.own_gradient for stage in states.values())
    units = [unit_memory(job, unit, versions) for stage in states.values() for unit in stage.units]
    factors = sum(group.state_bytes for stage in states.values() for group in stage.updates)
    activations, working = activation_bytes(job, program, pp_rank, tp_index)
    buffers = replay(job, program, pp_rank, states).buffers_bytes + kept_bytes(job, states)
    return RankMemory(
        parameters_bytes=sum(unit.parameters_bytes for unit in units),
        gradients_bytes=own_gradient + sum(unit.gradients_bytes for unit in units),
        optimizer_bytes=factors + sum(unit.optimizer_bytes for unit in units),
        activations_bytes=activations,
        buffers_bytes=buffers,
        working_bytes=working,
        host_bytes=sum(unit.host_bytes for unit in units),
    )


def unit_memory(job: JobSpec, unit: UnitState, versions: int = 1) -> RankMemory:
    """The memory of one unit between steps, with `versions` copies of its values."""
    zero, unit_size, shard = unit.replicas.zero, unit.layout.size, unit.layout.shard_size
    compute = _FLOAT if unit.is_exact else job.precision.compute_bytes
    values = versions * compute * (shard if zero == 3 else unit_size)
    is_hosted = zero == 3 and job.plan.offload_parameters
    on_device, on_host = _optimizer_bytes(job, unit)
    return RankMemory(
        parameters_bytes=0 if is_hosted else values,
        gradients_bytes=job.precision.gradient_bytes * (shard if zero >= 2 else unit_size),
        optimizer_bytes=on_device,
        activations_bytes=0,
        buffers_bytes=0,
        host_bytes=on_host + (values if is_hosted else 0),
    )


def _optimizer_bytes(job: JobSpec, unit: UnitState) -> tuple[int, int]:
    """Bytes of optimizer states and master weights (on the device, on the host); on the host with copies of gradients.

    Values in float32 serve as masters if both are in the same memory (parallel/zero/master_weights.py).
    """
    num_on_host = num_hosted(job.plan.offload_optimizer, unit.layout.shard_size)
    num_on_device = unit.layout.shard_size - num_on_host
    is_exact = unit.is_exact or job.precision.compute == "float32"
    # On a CPU host and device are one memory, but offloaded state is copied all the same.
    values_on_host = unit.replicas.zero == 3 and job.plan.offload_parameters and not job.runs_on_cpu
    has_master = {False: not is_exact or values_on_host, True: not is_exact or not values_on_host}
    moments = moment_bytes(job.optimizer, job.precision, unit.by_matrix)
    on_device = num_on_device * (moments + _FLOAT * has_master[False])
    return on_device, num_on_host * (moments + _FLOAT + _FLOAT * has_master[True])
