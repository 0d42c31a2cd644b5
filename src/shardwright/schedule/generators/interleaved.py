"""Interleaved 1F1B: a smaller bubble for more messages. Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.

Rank r holds stages r, p + r, 2p + r, ...: v chunks, each with a v-th of its layers. Microbatches come in groups of g: a
group runs through a rank's first chunk, then its second, and so on; then the next group follows. Backwards do the same
from the last chunk to the first. After a warm-up of 2(p - 1 - r) + (v - 1)g chunk forwards, forwards and backwards
alternate. The bubble is (p - 1)(F + B) / v, and v times as many messages are sent. Rank r keeps
(2(p - 1 - r) + (v - 1)g + 1) / v microbatches of its layers alive: with g = p, rank 0 keeps 1 + (p - 1) / (pv) times as
many as with 1F1B.

A group of more than p microbatches gives messages longer to arrive, and costs memory: with g = 2p a latency is paid
once per step and hop. If g does not divide m, the first group takes a remainder of up to p - 1 microbatches: no later
group may be larger, or its forwards come too late for the backwards. A remainder of p or more is a group of its own.
"""

from typing import Any

from shardwright.config.array_math import least, most
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import Action, backward, forward
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, group: int = 0) -> Schedule:
    """Groups of `group` microbatches (0 means p, and less than p is too few) on `num_chunks` chunks per rank."""
    groups = _groups(num_ranks, num_microbatches, group or num_ranks)
    chunk_order = [(i, chunk) for microbatches in groups for chunk in range(num_chunks) for i in microbatches]
    rows = []
    for rank in range(num_ranks):
        forwards = [forward(chunk * num_ranks + rank, i) for i, chunk in chunk_order]
        backwards = [backward((num_chunks - 1 - chunk) * num_ranks + rank, i) for i, chunk in chunk_order]
        warmup = min(len(chunk_order), 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * len(groups[0]))
        row: list[Action] = forwards[:warmup]
        for n in range(warmup, len(chunk_order)):
            row += [forwards[n], backwards[n - warmup]]
        row += backwards[len(chunk_order) - warmup :]
        rows.append(tuple(row))
    return Schedule("interleaved-1f1b", num_microbatches, looped(num_ranks, num_chunks), tuple(rows))


def _groups(num_ranks: int, num_microbatches: int, group: int) -> list[range]:
    remainder = num_microbatches % group
    sizes = [group] * (num_microbatches // group)
    if sizes and remainder < num_ranks:
        sizes[0] += remainder
    else:
        sizes.append(remainder)
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def interleaved_faults(num_ranks: int, group: int) -> list[str]:
    """Why a shape is not admitted."""
    if group == 0 or group >= num_ranks:
        return []
    return [
        say(
            "interleaved-1f1b needs groups of at least p microbatches, or the first is not back in time for the next "
            "chunk: group {group} < p {ranks}; use {ranks} or more",
            group=group,
            ranks=num_ranks,
        )
    ]


def _alive(p: Any, rank: Any, m: Any, v: Any, extra_warmup: Any) -> Any:
    first_group_size = p + m % p  # it takes the remainder; the formula holds for groups of p
    return least(m * v, 2 * (p - 1 - rank) + (v - 1) * first_group_size + 1) / v


def _num_gathers(p: Any, m: Any, v: Any) -> Any:
    warmup = least(m * v, p - 1 + (v - 1) * p)  # chunk forwards before forwards and backwards take turns
    steady_gathers = 2 * (m * v - warmup) * (1.0 - 1.0 / v)
    return most(1.0, (steady_gathers + 2 * warmup / p) / v)


FACTS = ScheduleFacts(
    name="interleaved-1f1b",
    place=40,
    make=lambda shape: interleaved(shape.num_ranks, shape.num_microbatches, shape.virtual_stages, shape.group),
    faults=lambda shape: interleaved_faults(shape.num_ranks, shape.group),
    understands=("group",),
    stages_per_rank=0,
    simpler="1f1b",
    placement=looped,
    bubble="(p - 1) * (F + B) / v",
    when="m >= p",
    # With fewer microbatches than ranks, each rank waits after a chunk until the first microbatch has come round.
    idle_s=lambda p, m, v, f, i, w: (p - 1 + (v - 1) * most(0, p - m)) * (f + (i + w)) / v,
    fills_and_drains=True,
    alive=_alive,
    keeps_as_1f1b=True,
    keeps_unevenly=True,
    num_gathers=_num_gathers,
    num_runs=lambda p, m: -(-m // p),
    num_waits=lambda p, m, v, extra_warmup: 2.0 * (p * v - 1),
    complexity=1,
    is_simple=True,
    search_place=20,
)
