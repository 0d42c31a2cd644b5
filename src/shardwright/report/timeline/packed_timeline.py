"""A timeline as columns of whole numbers, for a page: unpack.js makes of them the lists that painter.js draws.

A step may have ten thousand actions, and a page draws one anew with each change of a plan, so its data are quick to
make and to read: a column is the base64 of its numbers, 32 bits each, the lowest byte first. Times are multiples of a
tick. Blocks of one kind (colour, letter and stage) and messages of one route (sender, receiver, direction and stage)
differ in their microbatches alone.
"""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwright.report.timeline.colours import chunk_of, ink_on, shade
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.dependencies import MESSAGES, TRAVELS, Product
from shardwright.schedule.schedule import Program
from shardwright.simulate.action_columns import Array, Columns
from shardwright.simulate.buffer_curves import Kept
from shardwright.simulate.timeline import RankTimeline, Timeline

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
    ranks = [_packed_rank(timeline.program, row, blocks) for row in timeline.ranks]
    return {
        "tick": float(tick),
        "makespan": timeline.makespan,
        "ranks": ranks,
        "kinds": blocks.kinds,
        **_packed_messages(timeline, tick),
    }


def _packed_rank(program: Program, row: RankTimeline, blocks: "_Blocks") -> Packed:
    worked = row.worked[row.ends[row.worked] > row.starts[row.worked]]
    length = len(row.actions) // row.num_steps
    is_move = row.columns.are_of(Kind.REDUCE, Kind.GATHER, Kind.RELEASE)
    firsts = length * np.arange(row.num_steps)
    moves = (firsts[:, None] + row.columns.at[is_move]).ravel() if program.gathers else np.zeros(0, np.int64)
    waits = row.waits
    begun, ended = _ticks(waits.start, blocks.tick), _ticks(waits.end, blocks.tick)
    return {
        "busy": blocks.packed(row, worked),
        "idle": {"from": _column(begun), "to": _column(ended), "cause": _column(waits.cause)},
        "moves": blocks.packed(row, moves),
        **{name: _packed_curve(row.kept[buffer], blocks.tick) for name, buffer in _CURVES.items()},
    }


def _packed_curve(kept: Kept, tick: float) -> Packed:
    """The times and counts of a curve, without changes that last no time."""
    at = _ticks(kept.times, tick)
    lasts = np.append(np.diff(at) != 0, True)[: len(at)]
    return {"at": _column(at[lasts]), "count": _column(kept.counts[lasts])}


class _Blocks:
    """The kinds of blocks of a program: each is its parts' [colour, letter, stage], by a number of its own."""

    def __init__(self, program: Program, colours: Colours, tick: float) -> None:
        self._program, self._colours, self.tick = program, colours, tick
        self._copy_of = np.array(program.placement.copy_of or (0,) * program.num_microbatches)
        self._num_codes = 2 * len(Kind) * (program.num_stages + 1)  # of kind, stage and copy
        self.kinds: list[list[list[Any]]] = []
        self._numbers: dict[int, int] = {}

    def packed(self, row: RankTimeline, which: Array) -> Packed:
        """Some actions of a rank, given by index, as columns."""
        columns, m = row.columns, self._program.num_microbatches
        length = len(row.actions) // row.num_steps
        step, action = np.divmod(which, length)
        first = np.searchsorted(columns.at, action)
        is_pair = np.searchsorted(columns.at, action, side="right") - first > 1
        microbatch = columns.pair - columns.stage * m
        has_microbatch = (microbatch >= 0) & (columns.stage >= 0)
        copy = np.where(has_microbatch, self._copy_of[np.where(has_microbatch, microbatch, 0)], 0)
        stage_number = columns.stage - _NO_STAGE  # 0 without a stage
        code = (columns.kind.astype(np.int64) * (self._program.num_stages + 1) + stage_number) * 2 + copy
        second = np.where(is_pair, code[np.minimum(first + 1, len(code) - 1)] + 1, 0)
        both = code[first] * (1 + self._num_codes) + second
        codes, example, kind = np.unique(both, return_index=True, return_inverse=True)
        examples = [row.actions[n] for n in which[example].tolist()]
        numbers = np.array([self._number(*pair) for pair in zip(codes.tolist(), examples, strict=True)], np.int64)
        starts, ends = _ticks(row.starts[which], self.tick), _ticks(row.ends[which], self.tick)
        packed = {
            "from": _column(starts),
            "to": _column(ends),
            "kind": _column(numbers[kind]),
            "microbatch": _column(microbatch[first]),
        }
        if is_pair.any():
            packed["second"] = _column(microbatch[np.minimum(first + 1, len(code) - 1)])
        return packed | ({"step": _column(step)} if row.num_steps > 1 else {})

    def _number(self, code: int, action: Action) -> int:
        if code not in self._numbers:
            self._numbers[code] = len(self.kinds)
            self.kinds.append([self._part(part) for part in action.computes() or (action,)])
        return self._numbers[code]

    def _part(self, part: Action) -> list[Any]:
        letter = str(part.kind)
        ground = shade(letter, *(chunk_of(self._program, part) if part.kind in COMPUTE else (0, 1)))
        number = self._colours.setdefault((ground, ink_on(ground)), len(self._colours))
        return [number, letter, part.stage]


def _packed_messages(timeline: Timeline, tick: float) -> Packed:
    """The routes of a timeline and its messages, by direction and sender, in the order of the sends."""
    m = timeline.program.num_microbatches
    routes: dict[tuple[int, ...], int] = {}
    columns: dict[str, list[Array]] = {name: [] for name in ("from", "sent", "arrives", "route", "microbatch", "step")}
    for product in Product:
        arrived, receiver = _receives(timeline, product)
        for sender, row in enumerate(timeline.ranks):
            for step, (sends, starts, ends) in enumerate(_of_steps(row, MESSAGES[product][0])):
                begun, left = _ticks(starts, tick), _ticks(ends, tick)
                stage, taken = sends.stage, sends.pair + TRAVELS[product] * m
                num_stages = timeline.program.num_stages
                ways, which = np.unique(receiver[step, taken] * num_stages + stage, return_inverse=True)
                numbers = [
                    routes.setdefault((sender, to, int(product is Product.GRADIENT), made_by), len(routes))
                    for to, made_by in (divmod(way, num_stages) for way in ways.tolist())
                ]
                columns["from"].append(begun)
                columns["sent"].append(left)
                columns["arrives"].append(_ticks(arrived[step, taken], tick))
                columns["route"].append(np.array(numbers, np.int64)[which])
                columns["microbatch"].append(sends.pair - stage * m)
                columns["step"].append(np.full(len(stage), step))
    packed = {name: _column(np.concatenate(parts)) for name, parts in columns.items()}
    if timeline.ranks[0].num_steps == 1:
        del packed["step"]
    return {"routes": list(map(list, routes)), "messages": packed}


def _receives(timeline: Timeline, product: Product) -> tuple[Array, Array]:
    """The time at which a product arrives, and the rank that takes it, in arrays by step and by stage x microbatches +
    microbatch of the stage that takes it."""
    program = timeline.program
    shape = timeline.ranks[0].num_steps, program.num_stages * program.num_microbatches
    arrived, receiver = np.zeros(shape), np.zeros(shape, np.int64)
    for rank, row in enumerate(timeline.ranks):
        for step, (receives, _, ends) in enumerate(_of_steps(row, MESSAGES[product][1])):
            arrived[step, receives.pair], receiver[step, receives.pair] = ends, rank
    return arrived, receiver


def _of_steps(row: RankTimeline, kind: Kind) -> Iterator[tuple[Columns, Array, Array]]:
    """The actions of a kind in each step, with their starts and ends."""
    columns, length = row.columns.of_kinds(kind), len(row.actions) // row.num_steps
    for first in range(0, len(row.actions), length):
        yield columns, row.starts[first + columns.at], row.ends[first + columns.at]


def _ticks(times: Array, tick: float) -> Array:
    ticks: Array = np.rint(times / tick).astype(np.int64)
    return ticks


def _column(numbers: Array) -> str:
    return b64encode(numbers.astype("<i4").tobytes()).decode()
