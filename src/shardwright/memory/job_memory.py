"""The memory account of a job: the bytes that each pipeline rank will hold, by kind, before it runs.

Parameters, gradients and optimizer state are exact to the byte, padding included (Rajbhandari et al. 2020, arXiv
1910.02054, section 3.1: with 16-bit numbers and Adam 16 bytes a parameter, a part of which ZeRO shards, as in
sharding/zero_events.py). Activations are the tensors that autograd keeps of all microbatches in flight, and working
memory is the memory that operators need besides at the peak.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.memory.activation_peak import activation_bytes
from shardwright.memory.persistent_buffers import kept_bytes
from shardwright.memory.rank_state import StageState, UnitState, sized_state
from shardwright.memory.state_bytes import ElementBytes, HeldElements, state_bytes
from shardwright.memory.zero_replay import course_of, replay
from shardwright.schedule.job_program import job_program, steps_to_fill
from shardwright.schedule.lowering.weight_versions import stashed_versions
from shardwright.schedule.schedule import Program
from shardwright.sharding.buckets import num_hosted
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.optimizer_state import moment_bytes


def job_memory(job: JobSpec, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """Memory accounts of all pipeline ranks, or of `ranks`. Each is of the tensor-parallel rank with index 0, which
    holds most: it has the larger share of every split."""
    program = job_program(job, steps_to_fill(job))
    return [rank_memory(job, program, rank) for rank in (range(job.plan.pp) if ranks is None else ranks)]


def rank_memory(job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0) -> RankMemory:
    """The account of one rank that runs its list of `program`."""
    states = sized_state(job, program, pp_rank, tp_index)
    alike = _alike_ranks(job)
    versions = stashed_versions(program)[pp_rank]
    units = tp_index, *(state.like for state in states.values())
    if (state_key := (versions, *units)) not in alike.states:
        alike.states[state_key] = _between_steps(job, states, versions)
    course = course_of(program, pp_rank, states)
    if (buffers_key := (course, *units)) not in alike.buffers:
        replayed = replay(job, program, pp_rank, states, False)
        alike.buffers[buffers_key] = replayed.buffers_bytes + kept_bytes(job, states)
    activations, working = activation_bytes(job, program, pp_rank, tp_index)
    return replace(
        alike.states[state_key],
        activations_bytes=activations,
        buffers_bytes=alike.buffers[buffers_key],
        working_bytes=working,
    )


class _AlikeRanks(NamedTuple):
    """Parts of the accounts of a job's ranks, of which each is made once for all ranks that have stages with the same
    units: their memory between steps, and the bytes of their buffers if their courses are equal, too."""

    states: dict[tuple[object, ...], RankMemory]
    buffers: dict[tuple[object, ...], int]


@partial(kept_by_identity, most=2)
def _alike_ranks(job: JobSpec) -> _AlikeRanks:
    """The parts that `rank_memory` has made of a job's accounts."""
    return _AlikeRanks({}, {})


def _between_steps(job: JobSpec, states: Mapping[int, StageState], versions: int) -> RankMemory:
    """The memory of some stages between steps, with `versions` copies of their values."""
    own_gradient = job.precision.gradient_bytes * sum(stage.own_gradient for stage in states.values())
    units = [unit_memory(job, unit, versions) for stage in states.values() for unit in stage.units]
    factors = sum(group.state_bytes for stage in states.values() for group in stage.updates)
    return RankMemory(
        parameters_bytes=sum(unit.parameters_bytes for unit in units),
        gradients_bytes=own_gradient + sum(unit.gradients_bytes for unit in units),
        optimizer_bytes=factors + sum(unit.optimizer_bytes for unit in units),
        activations_bytes=0,
        buffers_bytes=0,
        host_bytes=sum(unit.host_bytes for unit in units),
    )


def unit_memory(job: JobSpec, unit: UnitState, versions: int = 1) -> RankMemory:
    """The memory of one unit between steps, with `versions` copies of its values."""
    zero, shard, precision = unit.replicas.zero, unit.layout.shard_size, job.precision
    hosted = 0 if unit.is_frozen else num_hosted(job.plan.offload_optimizer, shard)
    held = state_bytes(
        HeldElements(unit.layout.size, shard, hosted),
        ElementBytes(
            versions * unit.value_bytes(precision.compute_bytes),
            0 if unit.is_frozen else precision.gradient_bytes,
            0 if unit.is_frozen else moment_bytes(job.optimizer, precision, unit.by_matrix),
            is_master=unit.is_exact or precision.compute == precision.master_number,
            is_updated=not unit.is_frozen,
        ),
        zero,
        are_values_hosted=zero == 3 and job.plan.offload_parameters,
        is_one_memory=job.runs_on_cpu,
    )
    return RankMemory(
        parameters_bytes=held.parameters,
        gradients_bytes=held.gradients,
        optimizer_bytes=held.optimizer,
        activations_bytes=0,
        buffers_bytes=0,
        host_bytes=held.host,
    )
