"""The memory of one job's ranks as every command tells it: of this runtime the exact account, of others a prediction.

A search takes cost/memory.py in arrays, for thousands of plans; what it finds is judged by this.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwright.account.job_memory import job_memory
from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.config.units import GIB
from shardwright.cost.calibration import Constants, device_constant, device_of
from shardwright.cost.from_job import run_of
from shardwright.cost.memory import Memory, rank_memory
from shardwright.sharding.memory_account import RankMemory

_ALL = 8  # pipeline ranks of which the account is of each; of more those that may be the fullest
_FULLEST = 3


def job_memories(job: JobSpec, constants: Constants) -> list[Memory]:
    """Memory of every pipeline rank. KeyError says what is not known."""
    if not software_of(job.cluster.software).is_own:
        return rank_memory(run_of(job), constants)
    return [of_account(job, rank) for rank in _accounts(_Alike(job), None)]


def fullest(job: JobSpec, constants: Constants) -> Memory:
    """Memory of the pipeline rank that needs most of its device, with `host` of the one that offloads most.

    KeyError says what is not known.
    """
    if not software_of(job.cluster.software).is_own:
        return _fullest(rank_memory(run_of(job), constants))
    ranks = None
    if job.plan.pp > _ALL:
        foretold = [float(memory.process) for memory in rank_memory(run_of(job), constants)]
        nearest = np.argsort(foretold, kind="stable")[-_FULLEST:].tolist()
        ranks = tuple(sorted({0, len(foretold) // 2, len(foretold) - 1, *nearest}))
    return _fullest([of_account(job, rank) for rank in _accounts(_Alike(job), ranks)])


def room_words(job: JobSpec, constants: Constants) -> str:
    """What a device offers, and what is kept free of it beside a plan's own bytes. KeyError says what is not known."""
    device, software = device_of(job.cluster.device), software_of(job.cluster.software)
    shown = f"the {device.offered_bytes / GIB:.4g} GiB that a device shows of its {device.memory_gib:g}"
    if software.is_own:
        kept = f"{(device.offered_bytes - device.room_bytes) / GIB:.2g} GiB"
        return f"{shown}, less {kept} for a process's context, buffers of communication and what its allocator loses"
    context = f"{device_constant(constants, device, 'context_bytes') / GIB:.2g} GiB"
    lost = f"{device_constant(constants, device, 'memory_lost'):.1%}"
    return (
        f"{shown}, with {context} for a process's context and buffers of communication, and {lost} of activations, "
        "buffers and working memory for what its allocator loses"
    )


def _fullest(ranks: list[Memory]) -> Memory:
    most = max(ranks, key=lambda memory: float(memory.process))
    return replace(most, host=max(float(memory.host) for memory in ranks))


def of_account(job: JobSpec, rank: RankMemory) -> Memory:
    """A rank's account as a prediction has it; `overhead` is what the device's entry keeps for a process."""
    device = device_of(job.cluster.device)
    return Memory(
        float(rank.parameters_bytes),
        float(rank.gradients_bytes),
        float(rank.optimizer_bytes),
        float(rank.activations_bytes),
        buffers=float(rank.buffers_bytes),
        working=float(rank.working_bytes),
        overhead=device.offered_bytes - device.room_bytes,
        host=float(rank.host_bytes),
    )


class _Alike:
    """A job that equals another one of the same fields, so that its account is asked for once."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self._fields = job.model_dump_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)


@lru_cache(maxsize=64)
def _accounts(alike: _Alike, ranks: tuple[int, ...] | None) -> list[RankMemory]:
    return job_memory(alike.job, ranks)
