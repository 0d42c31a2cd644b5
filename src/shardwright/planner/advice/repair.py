"""A plan that does not fit: what exceeds by how much, on which rank; and the nearest plans that fit."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from shardwright.config.host_memory import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.cost.job_memories import fullest, job_memories
from shardwright.cost.memory import Memory
from shardwright.planner.advice.neighbours import neighbours
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import played_steps

_MOST_CHANGES = 3
_BEAM = 16  # plans from which further changes go on
_ACCOUNTED = 3  # fitting plans of each ZeRO stage and tp of which, at each number of changes, the account is asked
_SLOWEST = 4.0  # times as long as the plan that does not fit
_SHOWN = 4


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


def misfit(job: JobSpec, schedules: tuple[str, ...], constants: Constants) -> Misfit | None:
    """What exceeds, and plans that fit; None if the plan itself does."""
    room = room_bytes(job)
    ranks = job_memories(job, constants)
    most = max(range(len(ranks)), key=lambda rank: float(ranks[rank].process))
    excess, host_excess = float(ranks[most].process) - room, -math.inf
    if excess <= 0:
        most = max(range(len(ranks)), key=lambda rank: float(ranks[rank].host))
        host_excess = float(ranks[most].host) - host_room_bytes(job.cluster)
        excess = float(ranks[most].process) - room
    if max(excess, host_excess) <= 0:
        return None
    too_large = sum(not fits(job, memory, room) for memory in ranks)
    nearest = nearest_that_fit(job, schedules, constants, _SHOWN)
    return Misfit(most, too_large, ranks[most], excess, host_excess_bytes=host_excess, nearest=nearest)


def nearest_that_fit(job: JobSpec, schedules: tuple[str, ...], constants: Constants, num_shown: int) -> list[Near]:
    """Plans that fit with as few changes as it takes, three at most, fastest first. What is much slower than the job's
    own plan is no way out.

    Changes go on from plans than which none is faster and needs less, so there may be others.
    """
    room, seen = room_bytes(job), {job.plan.model_dump_json()}
    beam: list[tuple[tuple[str, ...], JobSpec]] = [((), job)]
    slowest_s = _SLOWEST * float(step_time(run_of(job), constants).total)
    for _ in range(_MOST_CHANGES):
        priced = sorted(_priced(_around(beam, schedules, seen), constants), key=_step_s)
        fitting = [near for near in priced if fits(job, near.price.memory, room) and _step_s(near) <= slowest_s]
        counted = (_counted(near, constants) for near in _varied(fitting))
        found = list(islice((near for near in counted if fits(near.job, near.price.memory, room)), num_shown))
        if found:
            return _simulated(found, constants)
        beam = [(near.changes, near.job) for near in _front(priced)[:_BEAM]]
    return []


def _counted(near: Near, constants: Constants) -> Near:
    """A plan with the memory that every command tells of it."""
    return replace(near, price=replace(near.price, memory=fullest(near.job, constants)))


def _simulated(found: list[Near], constants: Constants) -> list[Near]:
    """The plans with the times of their own orders of work, fastest first."""
    times = played_steps([near.job for near in found], [near.price.time for near in found], constants)
    played = [replace(near, price=replace(near.price, time=time)) for near, time in zip(found, times, strict=True)]
    return sorted(played, key=_step_s)


def _step_s(near: Near) -> float:
    return float(near.price.time.total)


def _varied(fitting: list[Near]) -> list[Near]:
    """The first of each ZeRO stage and tp: where one of them needs more than is predicted, so do others."""
    place = Counter[tuple[int, int]]()
    found = []
    for near in fitting:
        kind = near.job.plan.zero, near.job.plan.tp
        place[kind] += 1
        if place[kind] <= _ACCOUNTED:
            found.append(near)
    return found


def _front(priced: list[Near]) -> list[Near]:
    """Plans, given in the order of their time, that need less of the device than all faster ones; least first."""
    found: list[Near] = []
    for near in priced:
        if not found or near.price.memory.process < found[-1].price.memory.process:
            found.append(near)
    return found[::-1]


def _around(
    jobs: list[tuple[tuple[str, ...], JobSpec]], schedules: tuple[str, ...], seen: set[str]
) -> list[tuple[tuple[str, ...], JobSpec]]:
    """All neighbours that were not `seen`, each with the changes that lead to it."""
    found = []
    for changes, job in jobs:
        for near in neighbours(job, schedules):
            text = near.job.plan.model_dump_json()
            if text not in seen:
                seen.add(text)
                found.append(((*changes, f"{near.field} {near.value}"), near.job))
    return found


def _priced(tried: list[tuple[tuple[str, ...], JobSpec]], constants: Constants) -> Iterator[Near]:
    for (changes, job), price in zip(tried, prices([run_of(job) for _, job in tried], constants), strict=True):
        if isinstance(price, Price):
            yield Near(changes, job, price)
