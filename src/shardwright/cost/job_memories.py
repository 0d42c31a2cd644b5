"""The memory of one job's ranks as every command tells it: of this runtime the exact account, of others a prediction.

A search takes cost/memory.py in arrays, for thousands of plans; what it finds is judged by this.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwright.account.job_memory import rank_memory as account_of_rank
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.units import GIB
from shardwright.cost.calibration import Constants, device_constant, device_of
from shardwright.cost.communicators import job_room_bytes
from shardwright.cost.from_job import run_of
from shardwright.cost.memory import Memory, rank_memory
from shardwright.cost.pipeline_bubble import in_flight
from shardwright.schedule.job_program import job_order, steps_to_fill
from shardwright.sharding.memory_account import RankMemory
from shardwright.workload.memo import Memo

_ALL = 8  # with so many pipeline ranks or fewer, the account of each is made: one takes long
_FILLED, _FILLED_MORE = 2, 4  # times its ranks: so many microbatches fill a pipeline, with one piece a rank or more
_ENDS = 4  # microbatches besides, of a short pipeline: the first and the last are not like those between
_FULLEST = 3  # with more, so many of those that closed forms say need most, and three others


def job_memories(job: JobSpec, constants: Constants) -> list[Memory]:
    """Memory of every pipeline rank. KeyError says what is not known."""
    if not software_of(job.cluster.software).is_own:
        return rank_memory(run_of(job), constants)
    return list(_of_ranks(job, range(job.plan.pp)))


def fullest(job: JobSpec, constants: Constants) -> Memory:
    """Memory of the pipeline rank that needs most of its device, with `host` of the one that offloads most.

    KeyError says what is not known.
    """
    if not software_of(job.cluster.software).is_own:
        return _fullest(rank_memory(run_of(job), constants))
    ranks = range(job.plan.pp) if job.plan.pp <= _ALL else sorted(_ranks_to_ask(job, constants))
    return _fullest(list(_of_ranks(job, ranks)))


def every_rank_has_room(
    job: JobSpec, constants: Constants, has_room: Callable[[Memory], bool], memo: Memo | None = None
) -> bool:
    """True if the ranks that may be the fullest have room, as `has_room` judges the memory of one.

    The rank that is foretold to need most is judged first: where it has none, no other is asked for its account.
    `memo` has what was computed before of the same model and cluster. KeyError says what is not known.
    """
    if not software_of(job.cluster.software).is_own:
        return has_room(_fullest(rank_memory(run_of(job), constants, memo)))
    return all(map(has_room, _of_ranks(job, reversed(_ranks_to_ask(job, constants, memo)))))


def _of_ranks(job: JobSpec, ranks: Iterable[int]) -> Iterator[Memory]:
    """The memory of some pipeline ranks by their accounts, each made when it is asked for."""
    alike = _Alike(as_full(job))
    return (of_account(job, _account(alike, rank)) for rank in ranks)


def as_full(job: JobSpec) -> JobSpec:
    """The job with as few microbatches as fill its pipeline as much, in the same rounds: its ranks need as much memory.

    An order that is made to measure has no rounds, and one that does not drain counts in steps.
    """
    plan, m = job.plan, job.num_microbatches
    filled = _FILLED_MORE * plan.pp if plan.virtual_stages > 1 else _FILLED * plan.pp + _ENDS
    few = filled + (m - filled) % (2 * plan.pp)
    if few >= m or plan.pp == 1 or SCHEDULES[plan.schedule].idle_s is None:
        return job
    of_ranks = plan.schedule, plan.pp, np.arange(plan.pp)
    stages = plan.stages_per_rank, plan.extra_warmup
    if not np.array_equal(in_flight(*of_ranks, m, *stages), in_flight(*of_ranks, few, *stages)):
        return job
    size = few * plan.dp * plan.microbatch_size
    return job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch_size": size})})


def _ranks_to_ask(job: JobSpec, constants: Constants, memo: Memo | None = None) -> list[int]:
    """The pipeline ranks of which the account is made, those last that are foretold to need most."""
    foretold = [float(memory.process) for memory in rank_memory(run_of(job), constants, memo)]
    by_need = np.argsort(foretold, kind="stable").tolist()
    if job.plan.pp <= _ALL:
        return list(by_need)
    # The first has the embedding and most microbatches in flight, the last the head; one stands for those between.
    others = {0, len(foretold) // 2, len(foretold) - 1} - set(by_need[-_FULLEST:])
    return [*sorted(others), *by_need[-_FULLEST:]]


def room_words(job: JobSpec, constants: Constants) -> str:
    """Say what memory a device offers, and how much of it no plan can use. KeyError says what is not known."""
    device, software = device_of(job.cluster.device), software_of(job.cluster.software)
    shown = f"the {device.offered_bytes / GIB:.4g} GiB that a device shows of its {device.memory_gib:g}"
    if software.is_own:
        kept = f"{(device.offered_bytes - device.room_bytes) / GIB:.2g} GiB"
        return (
            f"{shown}, less {kept} for a process's context, buffers of communication and what its allocator loses, or "
            "more where a plan has many communicators"
        )
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
    """A rank's account as a prediction has it; `overhead` is all of the device that the plan can't fill."""
    return Memory(
        float(rank.parameters_bytes),
        float(rank.gradients_bytes),
        float(rank.optimizer_bytes),
        float(rank.activations_bytes),
        buffers=float(rank.buffers_bytes),
        working=float(rank.working_bytes),
        overhead=device_of(job.cluster.device).offered_bytes - job_room_bytes(job),
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


@lru_cache(maxsize=512)
def _account(alike: _Alike, rank: int) -> RankMemory:
    job = alike.job
    return account_of_rank(job, job_order(job, steps_to_fill(job)).program(), rank)
