"""The memory of a rank over time, by kind of buffer: from the lifetimes of buffers and the times of actions."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import RULES, Buffer, LifetimeRule, num_bytes
from shardwright.schedule.message_sizes import Sizes
from shardwright.simulate.action_columns import Array, Columns

Curve = tuple[tuple[float, int], ...]  # (time, number from then on), in order of time; 0 before the first


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Buffers of one kind on a rank: their number and bytes over time, in arrays; bytes are None if unknown."""

    times: Array
    counts: Array
    sizes: Array | None

    @property
    def count(self) -> Curve:
        """Their number over time."""
        return tuple(zip(self.times.tolist(), self.counts.tolist(), strict=True))

    @property
    def num_bytes(self) -> Curve | None:
        """Their bytes over time."""
        return None if self.sizes is None else tuple(zip(self.times.tolist(), self.sizes.tolist(), strict=True))

    @property
    def most(self) -> int:
        """Peak number of buffers."""
        return int(self.counts.max(initial=0))

    @property
    def most_bytes(self) -> int | None:
        """Peak bytes."""
        return None if self.sizes is None else int(self.sizes.max(initial=0))


class Lives(NamedTuple):
    """Buffers of one kind on a rank in one step, as columns: the stage of each, the actions of its birth and its death,
    and a mask of the buffers that the latter takes over."""

    stage: Array
    born: Array
    dies: Array
    is_taken: Array


LivesByBuffer = dict[Buffer, Lives]


def lives_on_rank(columns: Columns, trains: bool) -> LivesByBuffer:
    """All buffers of a rank, which runs the actions of `columns` in a step. Their times do not matter."""
    lives = {}
    for buffer in Buffer:
        of_rules = [_lives(rule, columns, trains) for rule in RULES if rule.buffer is buffer]
        lives[buffer] = Lives(*(np.concatenate(parts) for parts in zip(*of_rules, strict=True)))
    return lives


def kept_on_rank(
    lives: LivesByBuffer, sizes: Sizes | None, starts: Array, ends: Array, num_steps: int
) -> dict[Buffer, Kept]:
    """The memory of a rank over time, by kind of buffer. `lives` are of one step, starts and ends of all steps."""
    firsts = len(starts) // num_steps * np.arange(num_steps)
    curves = {}
    for buffer, (stage, born, dies, is_taken) in lives.items():
        if not len(born):
            curves[buffer] = Kept(np.zeros(0), born, born)
            continue
        # By lifetime and step, in arrays of (lifetimes, steps).
        born, dies = born[:, None] + firsts, dies[:, None] + firsts
        end = np.where(is_taken[:, None], starts[dies], ends[dies])
        if buffer is Buffer.MESSAGE:  # it exists from its arrival; its receive action begins when it departs
            begin, began, ended = ends[born], np.ones_like(born), np.zeros_like(born)
        else:  # changes at the same time are in the order of the program
            begin, began, ended = starts[born], 2 * born, 2 * dies + ~is_taken[:, None]
        is_there = begin < end if buffer is Buffer.MESSAGE else np.ones_like(born, bool)
        order = np.lexsort([np.stack(pair, -1)[is_there].ravel() for pair in ((began, ended), (begin, end))])
        times = np.stack([begin, end], -1)[is_there].ravel()[order]
        changes = np.tile([1, -1], len(order) // 2)[order]
        stages = np.stack([np.broadcast_to(stage[:, None], born.shape)] * 2, -1)[is_there].ravel()[order]
        curves[buffer] = Kept(times, np.cumsum(changes), _bytes_over_time(buffer, stages, changes, sizes))
    return curves


def _bytes_over_time(buffer: Buffer, stages: Array, changes: Array, sizes: Sizes | None) -> Array | None:
    """Bytes after each change of a buffer of some stage; None if unknown."""
    if sizes is None and len(stages):
        return None
    stage_bytes = {stage: num_bytes(buffer, stage, sizes) for stage in np.unique(stages).tolist()}
    if None in stage_bytes.values():
        return None
    # Python's integers, if the sum may exceed 64 bits.
    largest = max((size for size in stage_bytes.values() if size), default=0) * len(changes)
    table = np.zeros(1 + max(stage_bytes, default=0), object if largest >= 2**63 else np.int64)
    for stage, size in stage_bytes.items():
        table[stage] = size
    held_bytes: Array = np.cumsum(table[stages] * changes)
    return held_bytes


def _lives(rule: LifetimeRule, columns: Columns, trains: bool) -> Lives:
    """The buffers that a rule makes.

    For one stage and microbatch the n-th birth goes with the n-th death; a buffer that is never freed lives to the end.
    """
    begins, ends = columns.of_kinds(*rule.begins), columns.of_kinds(*rule.ends)
    if not len(begins.at):
        return Lives(begins.stage, begins.at, begins.at, np.zeros(0, bool))
    is_again = np.isin(begins.pair, columns.of_kinds(Kind.RECOMPUTE).pair)
    begins = begins.where((is_again == rule.of_recomputed) & trains | ~begins.are_of(Kind.FORWARD))
    dies, is_taken = np.full(len(begins.at), columns.at.max(initial=0)), np.zeros(len(begins.at), bool)
    as_born, as_died = (_numbered(events, len(columns.at)) for events in (begins, ends))
    _, matched_births, matching_ends = np.intersect1d(as_born, as_died, assume_unique=True, return_indices=True)
    dies[matched_births], is_taken[matched_births] = ends.at[matching_ends], rule.taken
    return Lives(begins.stage, begins.at, dies, is_taken)


def _numbered(columns: Columns, num_actions: int) -> Array:
    """A number for each (stage and microbatch, count of earlier actions with the same) of at most `num_actions`."""
    order = np.argsort(columns.pair, kind="stable")
    pair = columns.pair[order]
    numbers = np.empty_like(pair)
    numbers[order] = pair * num_actions + np.arange(len(pair)) - np.searchsorted(pair, pair)
    return numbers
