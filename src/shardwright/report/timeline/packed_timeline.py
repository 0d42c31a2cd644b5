"""A timeline as columns of whole numbers, for a page: unpack.js makes of them the lists that painter.js draws.

A step may have ten thousand actions, and a page draws one anew with each change of a plan, so its data are quick to
make and to read: a column is the base64 of its numbers, 32 bits each, the lowest byte first. Times are multiples of a
tick. Blocks of one kind (colour, letter and stage) and messages of one route (sender, receiver, direction and stage)
differ in their microbatches alone.
"""

from base64 import b64encode
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.report.timeline.colours import chunk_of, ink_on, shade
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.dependencies import MESSAGES, TRAVELS, Product
from shardwright.schedule.schedule import Program
from shardwright.simulate.action_columns import Array
from shardwright.simulate.buffer_curves import Kept
from shardwright.simulate.timeline import RankTimeline, Timeline, columns_by_rank

Packed = dict[str, Any]
Colours = dict[tuple[str, str], int]  # the number of each pair (ground, ink) in use
_DIGITS = 8  # of the makespan, in ticks
_NO_STAGE = -1  # of an action without one, in columns
_CURVES = {
    "alive": Buffer.ACTIVATIONS,
    "buffered": Buffer.MESSAGE,
    "inputs": Buffer.INPUT,
    "gathered": Buffer.PARAMETERS,
}


def packed_timeline(timeline: Timeline, colours: Colours) -> Packed:
    """The columns of a timeline. `colours` are those of all timelines of a page, and get those that are new."""
    size = timeline.makespan or 1.0
    tick = 10.0 ** (np.floor(np.log10(size)) + 1 - _DIGITS)
    blocks = _Blocks(timeline.program, colours, tick)
    ranks = [_packed_rank(timeline.program, rank, row, blocks) for rank, row in enumerate(timeline.ranks)]
    return {
        "tick": float(tick),
        "makespan": timeline.makespan,
        "ranks": ranks,
        "kinds": blocks.kinds,
        **_packed_messages(timeline, tick),
    }


def _packed_rank(program: Program, rank: int, row: RankTimeline, blocks: "_Blocks") -> Packed:
    worked = row.worked[row.ends[row.worked] > row.starts[row.worked]]
    length = len(row.actions) // row.num_steps
    is_move = row.columns.are_of(Kind.REDUCE, Kind.GATHER, Kind.RELEASE)
    firsts = length * np.arange(row.num_steps)
    moves = (firsts[:, None] + row.columns.at[is_move]).ravel() if program.gathers else np.zeros(0, np.int64)
    waits = row.waits
    begun, ended = _ticks(waits.start, blocks.tick), _ticks(waits.end, blocks.tick)
    return {
        "busy": blocks.packed(rank, row, worked),
        "idle": {"from": _column(begun), "to": _column(ended), "cause": _column(waits.cause)},
        "moves": blocks.packed(rank, row, moves),
        **{name: _packed_curve(row.kept[buffer], blocks.tick) for name, buffer in _CURVES.items()},
    }


def _packed_curve(kept: Kept, tick: float) -> Packed:
    """The times and counts of a curve, without changes that last no time."""
    at = _ticks(kept.times, tick)
    lasts = np.append(np.diff(at) != 0, True)[: len(at)]
    return {"at": _column(at[lasts]), "count": _column(kept.counts[lasts])}


@dataclass(frozen=True, eq=False)
class _Labels:
    """The actions of a program without their times: `kinds` are examples of each kind (letters, stages and direction);
    by rank and action, the number of its kind, its microbatch, and that of its second part."""

    kinds: list[Action]
    numbers: list[Array]
    microbatches: list[Array]
    seconds: list[Array]


@partial(kept_by_identity, most=4)  # a page asks for many timelines of one program
def _labels_of(program: Program) -> _Labels:
    m, examples, numbers = program.num_microbatches, list[Action](), dict[int, int]()
    copy_of = np.array(program.placement.copy_of or (0,) * m)
    num_codes = 2 * len(Kind) * (program.num_stages + 1)  # of kind, stage and copy
    by_action: list[tuple[Array, Array, Array]] = []
    for row, columns in zip(program.ranks, columns_by_rank(program), strict=True):
        first = np.searchsorted(columns.at, np.arange(len(row)))
        is_pair = np.searchsorted(columns.at, np.arange(len(row)), side="right") - first > 1
        microbatch = columns.pair - columns.stage * m
        has_microbatch = (microbatch >= 0) & (columns.stage >= 0)
        copy = np.where(has_microbatch, copy_of[np.where(has_microbatch, microbatch, 0)], 0)
        stage_number = columns.stage - _NO_STAGE  # 0 without a stage
        code = (columns.kind.astype(np.int64) * (program.num_stages + 1) + stage_number) * 2 + copy
        following = np.minimum(first + 1, len(code) - 1)
        both = code[first] * (1 + num_codes) + np.where(is_pair, code[following] + 1, 0)
        codes, example, kind = np.unique(both, return_index=True, return_inverse=True)
        for number, index in zip(codes.tolist(), example.tolist(), strict=True):
            if numbers.setdefault(number, len(numbers)) == len(examples):
                examples.append(row[index])
        kind_numbers = np.array([numbers[number] for number in codes.tolist()], np.int64)
        by_action.append((kind_numbers[kind], microbatch[first], microbatch[following]))
    return _Labels(examples, *(list(arrays) for arrays in zip(*by_action, strict=True)))


class _Blocks:
    """The kinds of blocks that are drawn: each is its parts' [colour, letter, stage], by a number of its own."""

    def __init__(self, program: Program, colours: Colours, tick: float) -> None:
        self._program, self._colours, self.tick = program, colours, tick
        self._labels = _labels_of(program)
        self._drawn = np.full(len(self._labels.kinds), -1)  # the number on the page of each kind of the program
        self.kinds: list[list[list[Any]]] = []

    def packed(self, rank: int, row: RankTimeline, which: Array) -> Packed:
        """Some actions of a rank, given by index, as columns."""
        labels = self._labels
        step, action = np.divmod(which, len(row.actions) // row.num_steps) if row.num_steps > 1 else (None, which)
        kind = labels.numbers[rank][action]
        for number in np.flatnonzero(np.bincount(kind, minlength=len(self._drawn)) * (self._drawn < 0)).tolist():
            self._drawn[number] = len(self.kinds)
            example = labels.kinds[number]
            self.kinds.append([self._part(part) for part in example.computes() or (example,)])
        packed = {
            "from": _column(_ticks(row.starts[which], self.tick)),
            "to": _column(_ticks(row.ends[which], self.tick)),
            "kind": _column(self._drawn[kind]),
            "microbatch": _column(labels.microbatches[rank][action]),
        }
        if row.columns.has_pairs and any(row.actions[n].parts for n in action.tolist()):
            packed["second"] = _column(labels.seconds[rank][action])
        return packed | ({} if step is None else {"step": _column(step)})

    def _part(self, part: Action) -> list[Any]:
        letter = str(part.kind)
        ground = shade(letter, *(chunk_of(self._program, part) if part.kind in COMPUTE else (0, 1)))
        number = self._colours.setdefault((ground, ink_on(ground)), len(self._colours))
        return [number, letter, part.stage]


@dataclass(frozen=True, eq=False)
class _Messages:
    """The messages of a program without their times, by direction and sender, in the order of the sends: `ways` are
    their distinct (sender, receiver, direction, stage), and `way` has the number of each. `sends` and `receives` are
    indices in the actions of all ranks, one rank after the other."""

    ways: list[list[int]]
    way: Array
    microbatch: Array
    sends: Array
    receives: Array


@partial(kept_by_identity, most=4)
def _messages_of(program: Program) -> _Messages:
    m, columns = program.num_microbatches, columns_by_rank(program)
    firsts = np.cumsum([0, *map(len, program.ranks)])
    ways: dict[tuple[int, ...], int] = {}
    parts: list[tuple[Array, ...]] = []
    for product, (send, receive) in MESSAGES.items():
        receiver, received_by = np.zeros((2, program.num_stages * m), np.int64)
        for rank, row in enumerate(columns):
            receives = row.of_kinds(receive)
            receiver[receives.pair], received_by[receives.pair] = rank, firsts[rank] + receives.at
        for rank, row in enumerate(columns):
            sends = row.of_kinds(send)
            taken = sends.pair + TRAVELS[product] * m
            told = zip(receiver[taken].tolist(), sends.stage.tolist(), strict=True)
            backward = int(product is Product.GRADIENT)
            way = [ways.setdefault((rank, to, backward, stage), len(ways)) for to, stage in told]
            parts.append(
                (np.array(way, np.int64), sends.pair - sends.stage * m, firsts[rank] + sends.at, received_by[taken])
            )
    return _Messages(list(map(list, ways)), *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _packed_messages(timeline: Timeline, tick: float) -> Packed:
    """The routes of a timeline and its messages, step by step."""
    messages, num_steps = _messages_of(timeline.program), timeline.ranks[0].num_steps
    starts, ends = (
        np.concatenate([moments.reshape(num_steps, -1) for moments in rows], 1)
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
    return b64encode(numbers.astype("<i4").tobytes()).decode()
