"""The memory of a rank over time, by kind of buffer: from the lifetimes of buffers and the times of actions."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.layers.arrays import Array
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import RULES, Buffer, LifetimeRule, num_bytes
from shardwright.schedule.message_sizes import Sizes
from shardwright.simulate.action_columns import Columns

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
    and a mask of the buffers that the latter takes over. A message is there from its arrival on."""

    stage: Array
    born: Array
    dies: Array
    is_taken: Array
    is_message: bool = False


LivesByBuffer = dict[Buffer, Lives]


def lives_on_rank(columns: Columns, trains: bool) -> LivesByBuffer:
    """All buffers of a rank, which runs the actions of `columns` in a step. Their times do not matter."""
    lives = {}
    for buffer in Buffer:
        of_rules = [_lives(rule, columns, trains) for rule in RULES if rule.buffer is buffer]
        stage, born, dies, is_taken = (
            np.concatenate([getattr(rule, name) for rule in of_rules]) for name in ("stage", "born", "dies", "is_taken")
        )
        lives[buffer] = Lives(stage, born, dies, is_taken, is_message=buffer is Buffer.MESSAGE)
    return lives


def kept_on_rank(
    lives: LivesByBuffer, sizes: Sizes | None, starts: Array, ends: Array, num_steps: int
) -> dict[Buffer, Kept]:
    """The memory of a rank over time, by kind of buffer. `lives` are of one step, starts and ends of all steps."""
    curves, moments = {}, np.concatenate([starts, ends])
    for buffer, of_buffer in lives.items():
        if not len(of_buffer.born):
            curves[buffer] = Kept(np.zeros(0), of_buffer.born, of_buffer.born)
            continue
        changes = _changes_of_step(of_buffer) if num_steps == 1 else _changes(of_buffer, len(starts), num_steps)
        times, added, stages = moments[changes.moment + changes.is_end * len(starts)], changes.added, changes.stage
        if buffer is Buffer.MESSAGE:  # one that leaves as it arrives was never there
            begins, ends_of = (np.empty(len(times) // 2) for _ in range(2))
            begins[changes.life[added > 0]], ends_of[changes.life[added < 0]] = times[added > 0], times[added < 0]
            is_there = (begins < ends_of)[changes.life]
            times, added, stages = times[is_there], added[is_there], stages[is_there]
        order = np.argsort(times, kind="stable")
        added, stages = added[order], stages[order]
        curves[buffer] = Kept(times[order], np.cumsum(added), _bytes_over_time(buffer, stages, added, sizes))
    return curves


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """The births and deaths of buffers of one kind, in the order of those at the same time, as columns: the lifetime of
    each, the action at whose start or end (`is_end`) it is, the buffers that it adds, and the stage."""

    life: Array
    moment: Array
    is_end: Array
    added: Array
    stage: Array


def _changes(lives: Lives, num_actions: int, num_steps: int) -> _Changes:
    """The changes of several steps, which have `num_actions` in all."""
    firsts = num_actions // num_steps * np.arange(num_steps)
    born, dies = (moments[:, None] + firsts for moments in (lives.born, lives.dies))  # (lifetimes, steps)
    is_taken = np.broadcast_to(lives.is_taken[:, None], born.shape)
    if lives.is_message:  # it exists from its arrival; its receive action begins when it departs
        began, ended, at_end = np.ones_like(born), np.zeros_like(born), np.ones_like(is_taken)
    else:  # changes at the same time are in the order of the program
        began, ended, at_end = 2 * born, 2 * dies + ~is_taken, np.zeros_like(is_taken)
    order = np.argsort(np.stack([began, ended], -1).ravel(), kind="stable")
    return _Changes(
        life=order // 2,
        moment=np.stack([born, dies], -1).ravel()[order],
        is_end=np.stack([at_end, ~is_taken], -1).ravel()[order],
        added=np.where(order % 2, -1, 1),
        stage=np.broadcast_to(lives.stage[:, None], born.shape).ravel()[order // 2],
    )


@partial(kept_by_identity, most=1024)  # a page asks for many timelines of one program
def _changes_of_step(lives: Lives) -> _Changes:
    """The changes of a single step."""
    return _changes(lives, 0, 1)


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
