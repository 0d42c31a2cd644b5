"""The memory of one job's ranks as every command reports it: the exact account for this runtime, else a prediction.

A search uses memory/rank_estimate.py in arrays, for thousands of plans; this module judges the plans that it returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.units import GIB
from shardwright.cost.calibration import Constants, device_constant, device_of
from shardwright.cost.communicators import job_room_bytes
from shardwright.cost.from_job import run_of
from shardwright.cost.pipeline_bubble import in_flight
from shardwright.layers.memo import Memo
from shardwright.memory.fit_chance import fit_chance
from shardwright.memory.job_memory import rank_memory as account_of_rank
from shardwright.memory.rank_estimate import Memory, rank_memory
from shardwright.schedule.job_program import job_order, steps_to_fill
from shardwright.schedule.schedule import Program
from shardwright.sharding.memory_account import RankMemory

_MOST_ACCOUNTS = 8  # up to so many pipeline ranks, the account of each is made; one account takes long
_FILLED, _FILLED_MORE = 2, 4  # microbatches over ranks that fill a pipeline, with one stage a rank and with more
_ENDS = 4  # further microbatches, for short pipelines: the first and the last are not like the others
_FULLEST = 3  # with more ranks, so many that need most by closed forms, and three others


AccountsByRank = Mapping[int, RankMemory]  # by pipeline rank


def job_memories(job: JobSpec, constants: Constants) -> list[Memory]:
    """Memory of every pipeline rank. KeyError names what is unknown."""
    if not software_of(job.cluster.software).is_own:
        return rank_memory(run_of(job), constants)
    return list(_memories(job, range(job.plan.pp)))


def job_accounts(job: JobSpec, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """The accounts of all pipeline ranks of this runtime, or of `ranks`, as `job_memory` makes them, where those that
    other functions here have made are not made again."""
    alike, asked = _Alike(as_full(job)), range(job.plan.pp) if ranks is None else ranks
    return [_account(alike, rank, asked) for rank in asked]


def fullest(job: JobSpec, constants: Constants) -> Memory:
    """Memory of the pipeline rank that needs most of its device, with `host` of the rank that offloads most.

    KeyError names what is unknown.
    """
    if not software_of(job.cluster.software).is_own:
        return _fullest(rank_memory(run_of(job), constants))
    ranks = range(job.plan.pp) if job.plan.pp <= _MOST_ACCOUNTS else sorted(_ranks_to_ask(job, constants))
    return _fullest(list(_memories(job, ranks)))


def job_fit_chance(job: JobSpec, process_bytes: float) -> float | None:
    """The chance that a process fits which is predicted to need so many bytes; None for this runtime, whose memory is
    counted."""
    if software_of(job.cluster.software).is_own:
        return None
    return fit_chance(process_bytes, device_of(job.cluster.device).offered_bytes)


def every_rank_has_room(
    job: JobSpec, constants: Constants, has_room: Callable[[Memory], bool], memo: Memo | None = None
) -> bool:
    """True if `has_room` is true for the memory of all ranks that may be the fullest.

    The rank with the highest predicted need is judged first: if it has no room, no other account is made. `memo` keeps
    earlier results of the same model and cluster. KeyError names what is unknown.
    """
    if not software_of(job.cluster.software).is_own:
        return has_room(_fullest(rank_memory(run_of(job), constants, memo)))
    return all(map(has_room, _memories(job, _ranks_to_ask(job, constants, memo)[::-1])))


def _memories(job: JobSpec, ranks: Sequence[int]) -> Iterator[Memory]:
    """The memory of some pipeline ranks by their accounts, each made when the iterator reaches it."""
    alike, overhead_bytes = _Alike(as_full(job)), device_of(job.cluster.device).offered_bytes - job_room_bytes(job)
    return (_as_memory(_account(alike, rank, ranks), overhead_bytes) for rank in ranks)


def as_full(job: JobSpec) -> JobSpec:
    """The job with the fewest microbatches that fill its pipeline in the same rounds: its ranks need as much memory.

    The job itself is returned if its order is solved for it and so has no rounds, or if its pipeline does not drain.
    """
    plan, m = job.plan, job.num_microbatches
    num_to_fill = _FILLED_MORE * plan.pp if plan.virtual_stages > 1 else _FILLED * plan.pp + _ENDS
    num_few = num_to_fill + (m - num_to_fill) % (2 * plan.pp)
    if num_few >= m or SCHEDULES[plan.schedule].idle_s is None:
        return job
    ranks = plan.schedule, plan.pp, np.arange(plan.pp)
    stages = plan.stages_per_rank, plan.extra_warmup
    if not np.array_equal(in_flight(*ranks, m, *stages), in_flight(*ranks, num_few, *stages)):
        return job
    size = num_few * plan.dp * plan.microbatch_size
    return job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch_size": size})})


def _ranks_to_ask(job: JobSpec, constants: Constants, memo: Memo | None = None) -> list[int]:
    """The pipeline ranks whose account is made; those with the highest predicted need come last."""
    predicted = [float(memory.process) for memory in rank_memory(run_of(job), constants, memo)]
    by_need = np.argsort(predicted, kind="stable").tolist()
    if job.plan.pp <= _MOST_ACCOUNTS:
        return list(by_need)
    # The first rank has the embedding and most microbatches in flight, the last the head; the middle represents others.
    samples = {0, len(predicted) // 2, len(predicted) - 1} - set(by_need[-_FULLEST:])
    return [*sorted(samples), *by_need[-_FULLEST:]]


def room_words(job: JobSpec, constants: Constants) -> str:
    """Text on the memory that a device offers and the part that no plan can use. KeyError names what is unknown."""
    device, software = device_of(job.cluster.device), software_of(job.cluster.software)
    shown = say(
        "the {offered:.4g} GiB that a device shows of its {memory:g}",
        offered=device.offered_bytes / GIB,
        memory=device.memory_gib,
    )
    if software.is_own:
        return say(
            "{shown}, less {kept:.2g} GiB for a process's context, buffers of communication and what its allocator "
            "loses, or more where a plan has many communicators",
            shown=shown,
            kept=(device.offered_bytes - device.room_bytes) / GIB,
        )
    return say(
        "{shown}, with {context:.2g} GiB for a process's context and buffers of communication, and {lost:.1%} of "
        "activations, buffers and working memory for what its allocator loses",
        shown=shown,
        context=device_constant(constants, device, "context_bytes") / GIB,
        lost=device_constant(constants, device, "memory_lost"),
    )


def _fullest(ranks: list[Memory]) -> Memory:
    fullest_rank = max(ranks, key=lambda memory: float(memory.process))
    return replace(fullest_rank, host=max(float(memory.host) for memory in ranks))


def _as_memory(rank: RankMemory, overhead_bytes: float) -> Memory:
    """A rank's account in the form of a prediction; `overhead_bytes` are the part of the device that the plan can't
    fill."""
    return Memory(
        float(rank.parameters_bytes),
        float(rank.gradients_bytes),
        float(rank.optimizer_bytes),
        float(rank.activations_bytes),
        buffers=float(rank.buffers_bytes),
        working=float(rank.working_bytes),
        overhead=overhead_bytes,
        host=float(rank.host_bytes),
        slack=0.0,
    )


class _Alike:
    """A job that equals another one with the same fields, so that its account is made once."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self._fields = job.model_dump_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(self._fields)


def known_accounts(job: JobSpec) -> AccountsByRank:
    """The accounts of a job's pipeline ranks that this process has made or taken over so far."""
    return dict(_accounts(_Alike(as_full(job))))


def take_over_accounts(job: JobSpec, accounts: AccountsByRank) -> None:
    """Keep accounts of a job's pipeline ranks that another process has made, so that they are not made again."""
    _accounts(_Alike(as_full(job))).update(accounts)


@lru_cache(maxsize=512)
def _accounts(alike: _Alike) -> dict[int, RankMemory]:
    """The accounts of a job's pipeline ranks that are kept, to which this module alone adds; none at first."""
    return {}


def _account(alike: _Alike, rank: int, ranks: Sequence[int]) -> RankMemory:
    """The account of a pipeline rank, one of the `ranks` whose accounts may be needed."""
    accounts = _accounts(alike)
    if rank not in accounts:
        asked = tuple(ranks) if len(ranks) < alike.job.plan.pp else None
        accounts[rank] = account_of_rank(alike.job, _program(alike, asked), rank)
    return accounts[rank]


@lru_cache(maxsize=2)  # it is asked for each rank
def _program(alike: _Alike, ranks: tuple[int, ...] | None) -> Program:
    """The program of a job, with the lists of some ranks, or of all."""
    return job_order(alike.job, steps_to_fill(alike.job)).program(ranks)
