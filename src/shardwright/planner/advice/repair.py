"""A plan that does not fit: what exceeds by how much, on which rank; and the nearest plans that fit."""

import math
from dataclasses import dataclass

from shardwright.config.host_memory import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.cost.memory import Memory, rank_memory
from shardwright.planner.advice.neighbours import neighbours
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.simulate.batch_pricing import Price, prices

_MOST_TRIED = 200  # plans two changes away


@dataclass(frozen=True)
class Near:
    """A plan that fits: what was changed, the job under it, and its price."""

    changes: tuple[str, ...]
    job: JobSpec
    price: Price


@dataclass(frozen=True)
class Misfit:
    """The pipeline ranks that need too much, the first that needs most, by how many bytes, and plans that fit.

    `excess_bytes` is of the device, and `host_excess_bytes` of a device's share of its node's host memory; one of them
    may be negative, which is then what is left.
    """

    rank: int
    num_ranks: int
    memory: Memory
    excess_bytes: float
    host_excess_bytes: float
    nearest: list[Near]


def misfit(job: JobSpec, schedules: tuple[str, ...], constants: Constants, num_shown: int = 4) -> Misfit | None:
    """None if the plan fits. Nearest are plans with one change, or two where none with one fits, fastest first."""
    room = room_bytes(job)
    ranks = rank_memory(run_of(job), constants)
    most = max(range(len(ranks)), key=lambda rank: float(ranks[rank].process))
    excess, host_excess = float(ranks[most].process) - room, -math.inf
    if excess <= 0:
        most = max(range(len(ranks)), key=lambda rank: float(ranks[rank].host))
        host_excess = float(ranks[most].host) - host_room_bytes(job.cluster)
        excess = float(ranks[most].process) - room
    if max(excess, host_excess) <= 0:
        return None
    tried = _around([((), job)], schedules)
    fitting = _that_fit(tried, room, constants)
    if not fitting:
        fitting = _that_fit(_around(tried, schedules)[:_MOST_TRIED], room, constants)
    too_large = sum(not fits(job, memory, room) for memory in ranks)
    return Misfit(most, too_large, ranks[most], excess, host_excess_bytes=host_excess, nearest=fitting[:num_shown])


def _around(
    jobs: list[tuple[tuple[str, ...], JobSpec]], schedules: tuple[str, ...]
) -> list[tuple[tuple[str, ...], JobSpec]]:
    """All neighbours, each with the changes that lead to it."""
    return [
        ((*changes, f"{near.field} {near.value}"), near.job)
        for changes, job in jobs
        for near in neighbours(job, schedules)
    ]


def _that_fit(tried: list[tuple[tuple[str, ...], JobSpec]], room: float, constants: Constants) -> list[Near]:
    """Fastest first."""
    found = [
        Near(changes, job, price)
        for (changes, job), price in zip(tried, prices([run_of(job) for _, job in tried], constants), strict=True)
        if isinstance(price, Price) and fits(job, price.memory, room)
    ]
    return sorted(found, key=lambda near: float(near.price.time.total) / near.job.tokens_per_step)
