"""A timeline as columns of whole numbers, for a page: unpack.js makes of them the lists that painter.js draws.

A step may have ten thousand actions, and a page draws one anew with each change of a plan, so its data are quick to
make and to read. A column has the numbers of all ranks, one rank after the other: it is a digit, and the base64 of its
numbers, of which each has as many bytes as the digit says, the lowest first. Times are multiples of a tick. Blocks of
one kind (colour, letter and stage) and messages of one route (sender, receiver, direction and stage) differ in their
microbatches alone.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.layers.arrays import Array
from shardwright.report.timeline.colours import chunk_of, ink_on, shade
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.dependencies import MESSAGES, TRAVELS, Product
from shardwright.schedule.schedule import Program
from shardwright.simulate.action_columns import step_actions
from shardwright.simulate.buffer_curves import Kept
from shardwright.simulate.timeline import RankTimeline, Timeline

Packed = dict[str, Any]
Colours = dict[tuple[str, str], int]  # the number of each pair (ground, ink) in use
_DIGITS = 8  # of the makespan, in ticks
_NO_STAGE = -1  # of an action without one, in columns
_WIDTHS = (1, 2, 4)  # bytes of a number in a column
_CURVES = {
    "alive": Buffer.ACTIVATIONS,
    "buffered": Buffer.MESSAGE,
    "inputs": Buffer.INPUT,
    "gathered": Buffer.PARAMETERS,
}


def packed_timeline(timeline: Timeline, colours: Colours) -> Packed:
    """The columns of a timeline, each list with its lengths on the ranks. `colours` are those of all timelines of a
    page, and get those that are new."""
    size, ranks = timeline.makespan or 1.0, timeline.ranks
    tick = 10.0 ** (np.floor(np.log10(size)) + 1 - _DIGITS)
    blocks = _Blocks(timeline, colours, tick)
    waits = [row.waits for row in ranks]
    return {
        "tick": float(tick),
        "makespan": timeline.makespan,
        "num_ranks": len(ranks),
        "lists": {
            "busy": blocks.packed([row.worked[row.ends[row.worked] > row.starts[row.worked]] for row in ranks]),
            "idle": {
                "lengths": [len(rows.cause) for rows in waits],
                "from": _column(_ticks(np.concatenate([rows.start for rows in waits]), tick)),
                "to": _column(_ticks(np.concatenate([rows.end for rows in waits]), tick)),
                "cause": _column(np.concatenate([rows.cause for rows in waits])),
            },
            "moves": blocks.packed([_moves(timeline.program, row) for row in ranks]),
            **{name: _packed_curves([row.kept[buffer] for row in ranks], tick) for name, buffer in _CURVES.items()},
        },
        "kinds": blocks.kinds,
        **_packed_messages(timeline, tick),
    }


def _moves(program: Program, row: RankTimeline) -> Array:
    """Indices of a rank's gathers, reductions and releases."""
    if not program.gathers:
        return np.zeros(0, np.int64)
    is_move = row.columns.are_of(Kind.REDUCE, Kind.GATHER, Kind.RELEASE)
    firsts = len(row.actions) // row.num_steps * np.arange(row.num_steps)
    moves: Array = (firsts[:, None] + row.columns.at[is_move]).ravel()
    return moves


def _packed_curves(curves: Sequence[Kept], tick: float) -> Packed:
    """The times and counts of the ranks' curves, without changes that last no time."""
    lengths = [len(kept.times) for kept in curves]
    at = _ticks(np.concatenate([kept.times for kept in curves]), tick)
    counts = np.concatenate([kept.counts for kept in curves])
    rank = np.repeat(np.arange(len(curves)), lengths)
    lasts = np.append((np.diff(at) != 0) | (np.diff(rank) != 0), True)[: len(at)]
    lengths = np.bincount(rank[lasts], minlength=len(curves)).tolist()
    return {"lengths": lengths, "at": _column(at[lasts]), "count": _column(counts[lasts])}


@dataclass(frozen=True, eq=False)
class _Labels:
    """The actions of a program without their times: `kinds` are examples of each kind (letters, stages and direction);
    by number of the action, the number of its kind, its microbatch, and that of its second part."""

    kinds: list[Action]
    numbers: Array
    microbatches: Array
    seconds: Array
    has_pairs: bool


@partial(kept_by_identity, most=4)  # a page asks for many timelines of one program
def _labels_of(program: Program) -> _Labels:
    m, columns = program.num_microbatches, step_actions(program).columns
    rows = [action for row in program.ranks for action in row]
    copy_of = np.array(program.placement.copy_of or (0,) * m)
    num_codes = 2 * len(Kind) * (program.num_stages + 1)  # of kind, stage and copy
    first = np.searchsorted(columns.at, np.arange(len(rows)))
    is_pair = np.searchsorted(columns.at, np.arange(len(rows)), side="right") - first > 1
    microbatch = columns.pair - columns.stage * m
    has_microbatch = (microbatch >= 0) & (columns.stage >= 0)
    copy = np.where(has_microbatch, copy_of[np.where(has_microbatch, microbatch, 0)], 0)
    stage_number = columns.stage - _NO_STAGE  # 0 without a stage
    code = (columns.kind.astype(np.int64) * (program.num_stages + 1) + stage_number) * 2 + copy
    following = np.minimum(first + 1, len(code) - 1)
    both = code[first] * (1 + num_codes) + np.where(is_pair, code[following] + 1, 0)
    _, examples, numbers = np.unique(both, return_index=True, return_inverse=True)
    kinds = [rows[index] for index in examples.tolist()]
    return _Labels(kinds, numbers, microbatch[first], microbatch[following], has_pairs=bool(is_pair.any()))


class _Blocks:
    """The kinds of blocks that are drawn: each is its parts' [colour, letter, stage], by a number of its own."""

    def __init__(self, timeline: Timeline, colours: Colours, tick: float) -> None:
        self._timeline, self._colours, self._tick = timeline, colours, tick
        self._labels = _labels_of(timeline.program)
        self._drawn = np.full(len(self._labels.kinds), -1)  # the number on the page of each kind of the program
        self.kinds: list[list[list[Any]]] = []

    def packed(self, which: Sequence[Array]) -> Packed:
        """Some actions of each rank, given by index, as columns."""
        labels, ranks = self._labels, self._timeline.ranks
        starts, ends = (
            np.concatenate([moments[indices] for moments, indices in zip(rows, which, strict=True)])
            for rows in ([row.starts for row in ranks], [row.ends for row in ranks])
        )
        rank = np.repeat(np.arange(len(ranks)), [len(indices) for indices in which])
        lengths, firsts = np.diff(actions := step_actions(self._timeline.program).firsts), actions[:-1]
        step, index = np.divmod(np.concatenate(which), lengths[rank])
        action = firsts[rank] + index
        kind = labels.numbers[action]
        for number in np.flatnonzero(np.bincount(kind, minlength=len(self._drawn)) * (self._drawn < 0)).tolist():
            self._drawn[number] = len(self.kinds)
            example = labels.kinds[number]
            self.kinds.append([self._part(part) for part in example.computes() or (example,)])
        columns = {
            "from": _ticks(starts, self._tick),
            "to": _ticks(ends, self._tick),
            "kind": self._drawn[kind],
            "microbatch": labels.microbatches[action],
        }
        if labels.has_pairs:
            columns["second"] = labels.seconds[action]
        if ranks[0].num_steps > 1:
            columns["step"] = step
        lengths = np.bincount(rank, minlength=len(ranks))
        return {"lengths": lengths.tolist(), **{name: _column(column) for name, column in columns.items()}}

    def _part(self, part: Action) -> list[Any]:
        letter = str(part.kind)
        ground = shade(letter, *(chunk_of(self._timeline.program, part) if part.kind in COMPUTE else (0, 1)))
        number = self._colours.setdefault((ground, ink_on(ground)), len(self._colours))
        return [number, letter, part.stage]


@dataclass(frozen=True, eq=False)
class _Messages:
    """The messages of a program without their times, by direction and sender, in the order of the sends: `ways` are
    their distinct (sender, receiver, direction, stage), and `way` has the number of each. `sends` and `receives` are
    numbers of actions."""

    ways: list[list[int]]
    way: Array
    microbatch: Array
    sends: Array
    receives: Array


@partial(kept_by_identity, most=4)
def _messages_of(program: Program) -> _Messages:
    m, actions = program.num_microbatches, step_actions(program)
    parts: list[tuple[Array, ...]] = []
    for product, (send, receive) in MESSAGES.items():
        receives, sends = actions.columns.of_kinds(receive), actions.columns.of_kinds(send)
        received_by = np.zeros(program.num_stages * m, np.int64)
        received_by[receives.pair] = receives.at
        received = received_by[sends.pair + TRAVELS[product] * m]
        direction = np.full(len(sends.at), int(product is Product.GRADIENT))
        way = np.stack([actions.rank_of(sends.at), actions.rank_of(received), direction, sends.stage], -1)
        parts.append((way, sends.pair - sends.stage * m, sends.at, received))
    way, *others = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ways, number = np.unique(way, axis=0, return_inverse=True)
    return _Messages(ways.tolist(), number.ravel(), *others)


def _packed_messages(timeline: Timeline, tick: float) -> Packed:
    """The routes of a timeline and its messages, step by step."""
    messages, num_steps = _messages_of(timeline.program), timeline.ranks[0].num_steps
    actions = step_actions(timeline.program)
    starts, ends = (
        actions.by_step(rows, num_steps)
        for rows in ([row.starts for row in timeline.ranks], [row.ends for row in timeline.ranks])
    )
    columns = {
        "from": _ticks(starts[:, messages.sends], tick),
        "sent": _ticks(ends[:, messages.sends], tick),
        "arrives": _ticks(ends[:, messages.receives], tick),
        "route": np.tile(messages.way, num_steps),
        "microbatch": np.tile(messages.microbatch, num_steps),
    }
    if num_steps > 1:
        columns["step"] = np.repeat(np.arange(num_steps), len(messages.way))
    return {"routes": messages.ways, "messages": {name: _column(column.ravel()) for name, column in columns.items()}}


def _ticks(times: Array, tick: float) -> Array:
    ticks: Array = np.rint(times / tick).astype(np.int64)
    return ticks


def _column(numbers: Array) -> str:
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    width = next(width for width in _WIDTHS if -(2 ** (8 * width - 1)) <= least and most < 2 ** (8 * width - 1))
    return f"{width}{b64encode(numbers.astype(f'<i{width}').tobytes()).decode()}"
