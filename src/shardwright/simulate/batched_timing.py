"""When the steps of a schedule end, under many costs at once.

`schedule/timing.py` gives each action of a program its times, one after the other. Here only the ends of steps are
wanted, of many plans that run in one order, and the same recurrence is laid out once for all of them: in rounds, in
each of which every rank that has its inputs does its next piece of work. A round is a few operations on arrays of shape
(its pieces, costs). Messages are no work of their own: what a rank makes leaves by a link, in the order in which it is
made, and its receiver waits for it. What neither waits nor sends is done with the work before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from shardwright.schedule.action import Kind
from shardwright.schedule.dependencies import MAKES, NEEDS, TRAVELS, Need, Product
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.timing import Costs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Rows of a table of costs come in blocks of stages, in this order; C takes what F does.
_F, _I, _W, _B, _C, _STEP, _REDUCE, _GATHER, _PAIR = range(9)
_NUMBER = {
    Kind.FORWARD: _F, Kind.INPUT_GRAD: _I, Kind.WEIGHT_GRAD: _W, Kind.BACKWARD: _B, Kind.RECOMPUTE: _C,
    Kind.STEP: _STEP, Kind.REDUCE: _REDUCE, Kind.GATHER: _GATHER, Kind.OVERLAP: _PAIR,
}  # fmt: skip
# Events: one that is there from the start, one that never is, one that nobody waits for; then marks, then messages.
_THERE, _NEVER, _UNSEEN, _MARKS = range(4)
_QUEUED = ("reduce", "gather")  # costs of collectives, in the order of their rows


@dataclass(frozen=True)
class Collectives:
    """Reductions and gathers that ranks issue when a piece of work is done, at most one each; a rank's run in a queue.

    `behind` is the piece and `row` that of the cost, gathers behind reductions; the end of each is its mark.
    """

    rank: Ints
    behind: Ints
    row: Ints
    mark: Ints

    def after(self, before: Ints, some: Ints) -> "Collectives":
        """Some of them, where `behind` says which piece comes next; `before` is which one comes before each."""
        return Collectives(self.rank[some], before[self.behind[some]], self.row[some], self.mark[some])


@dataclass(frozen=True)
class Round:
    """Pieces `first` to `last`, one of each of some ranks, and the collectives that stand before them.

    `waits` says whether some of them wait for marks.
    """

    first: int
    last: int
    waits: bool
    issued: tuple[Collectives, ...]


@dataclass(frozen=True)
class Rounds:
    """An order of work. A piece of work is one action or several; pieces are numbered in the order of rounds.

    By piece: the one before it on its rank, which of the first is the last; by product the message that it waits
    for, 2 n + product for what piece n has sent, and the border between stages that its own passes; and the marks
    that it waits for, which are ends of collectives.
    By action, one rank after the other: its row of costs. `begins` are the actions that begin a piece, `order` which
    of these the pieces are, `ranks` the first actions of ranks; `pairs` are the rows of the parts of pairs.
    """

    num_stages: int
    num_marks: int
    rounds: tuple[Round, ...]
    before: Ints
    messages: Ints
    borders: Ints
    waits: Ints
    rows: Ints
    begins: Ints
    order: Ints
    ranks: Ints
    pairs: Ints

    def ends(self, costs: Sequence[Costs], num_steps: int = 1) -> Floats:
        """When each of some steps that run back to back ends, (steps, costs); the first begins at 0.

        As in `play`, no rank waits for all others between two steps.
        """
        num_costs, num_pieces = len(costs), len(self.order)
        action_s = self._table(costs)[self.rows]
        piece_s = np.add.reduceat(action_s, self.begins, axis=0)[self.order]
        made_s = action_s[self.begins][self.order]  # until what a piece makes leaves
        sent_s = _by_stage([one.transfer for one in costs], self.num_stages)[self.borders]
        queued_s = np.concatenate(
            [_by_stage([getattr(one, name) for one in costs], self.num_stages) for name in _QUEUED]
        )
        latency_s = np.array([one.latency for one in costs])
        ended = np.zeros((num_pieces, num_costs))
        left = np.zeros((num_pieces + 1, 2, num_costs))  # from when a rank's links are free again
        left[-1] = -np.inf  # no message
        sent, (ahead, back) = left.reshape(-1, num_costs), self.messages.T
        queue, marks = np.zeros((len(self.ranks), num_costs)), np.zeros((self.num_marks, num_costs))
        end_s = np.empty((num_steps, num_costs))
        for step in range(num_steps):
            for at in self.rounds:
                for one in at.issued:
                    begun = np.maximum(queue[one.rank], ended[one.behind])
                    queue[one.rank] = marks[one.mark] = begun + queued_s[one.row]
                here = slice(at.first, at.last)
                before = self.before[here]
                begun = np.maximum(sent.take(ahead[here], 0), sent.take(back[here], 0)) + latency_s
                np.maximum(begun, ended.take(before, 0), out=begun)
                if at.waits:
                    np.maximum(begun, marks.take(self.waits[here], 0).max(axis=1), out=begun)
                np.add(begun, piece_s[here], out=ended[here])
                begun += made_s[here]
                np.maximum(left.take(before, 0), begun[:, None], out=left[here])
                left[here] += sent_s[here]
            end_s[step] = ended.max(axis=0)
        return end_s

    def busy(self, costs: Sequence[Costs]) -> Floats:
        """The compute time of a step on the rank that computes longest, by costs."""
        by_rank: Floats = np.add.reduceat(self._table(costs)[self.rows], self.ranks, axis=0)
        return np.asarray(by_rank.max(axis=0))

    def queued(self, costs: Sequence[Costs]) -> Floats:
        """How long the collectives of the rank that has most of them take in a step, by costs."""
        queue_s = np.zeros((len(self.ranks), len(costs)))
        seconds = np.concatenate(
            [_by_stage([getattr(one, name) for one in costs], self.num_stages) for name in _QUEUED]
        )
        for at in self.rounds:
            for one in at.issued:
                queue_s[one.rank] += seconds[one.row]
        return np.asarray(queue_s.max(axis=0))

    def _table(self, costs: Sequence[Costs]) -> Floats:
        """Costs of work, (rows, costs)."""
        forward, input_grad, weight_grad = (
            np.array([getattr(cost, name) for cost in costs]).T for name in ("forward", "input_grad", "weight_grad")
        )
        step, pair = np.array([[cost.step for cost in costs], [cost.pair for cost in costs]])
        steps = np.broadcast_to(step, forward.shape)
        table = np.concatenate([forward, input_grad, weight_grad, input_grad + weight_grad, forward, steps])
        return np.concatenate([table, pair * (table[self.pairs[:, 0]] + table[self.pairs[:, 1]])])


def _by_stage(values: Sequence[tuple[float, ...]], num_stages: int) -> Floats:
    """(stages, costs); 0 where nothing is given."""
    table = np.zeros((num_stages, len(values)))
    for column, seconds in enumerate(values):
        table[: len(seconds), column] = seconds
    return table


def rounds_of(schedule: Schedule, has_collectives: bool) -> Rounds:
    """Lay out a schedule that drains, with its updates and without messages (`training_order`).

    Without collectives these are left out: they take no time. That the two copies of a stage are reduced together is
    left out too: it delays no end of a step, for their ranks reduce in one order. Each rank's own list is taken to be
    in order; ValueError if what it waits for of others can never come.
    """
    return _Layout(schedule, has_collectives).rounds()


class _Layout:
    """The actions of all ranks as columns, one rank after the other, and of pairs both parts. Events are numbers."""

    def __init__(self, schedule: Schedule, has_collectives: bool) -> None:
        assert schedule.weights == "current", f"{schedule.name} has no end of a step"
        self.schedule = schedule
        left_out = {Kind.RELEASE} if has_collectives else {Kind.RELEASE, Kind.REDUCE, Kind.GATHER}
        rows = [[action for action in row if action.kind not in left_out] for row in schedule.ranks]
        actions = list(chain.from_iterable(rows))
        self.rank = np.repeat(np.arange(len(rows)), list(map(len, rows)))
        self.kind = np.array([_NUMBER[action.kind] for action in actions])
        is_paired = self.kind == _PAIR
        self.at = np.repeat(np.arange(len(actions)), 1 + is_paired)  # of parts, their action
        parts = [part for action in actions for part in action.parts or (action,)] if is_paired.any() else actions
        self.part = np.array([_NUMBER[part.kind] for part in parts])
        self.stage = np.array([part.stage for part in parts])
        self.microbatch = np.array([part.microbatch for part in parts])
        self.is_collective = (self.kind == _REDUCE) | (self.kind == _GATHER)
        # Marks: by (rank, stage) when parameters are gathered, by rank when its reductions are over. Messages: by
        # product and (stage, microbatch) of what makes them.
        self.gathered, self.reduced = _MARKS, _MARKS + len(rows) * schedule.num_stages
        self.messages = self.reduced + len(rows)
        self.num_events = self.messages + 2 * schedule.num_stages * schedule.num_microbatches

    def rounds(self) -> Rounds:
        """The work in rounds."""
        messages, made, borders = self._messages()
        waits = self._waits()
        begins = np.ones(len(self.kind), bool)
        begins[1:] = (self.rank[1:] != self.rank[:-1]) | self.is_collective[:-1]
        begins |= (messages != _THERE).any(axis=1) | (waits != _THERE).any(axis=1) | (made != _UNSEEN).any(axis=1)
        begins &= ~self.is_collective
        heads = np.flatnonzero(begins)
        num_begun = np.cumsum(begins)  # up to an action: of a collective, the number of the piece behind it
        collectives, standing = self._collectives(num_begun, len(heads))
        is_missing = np.zeros(self.num_events, bool)
        is_missing[self.messages :] = is_missing[_NEVER] = True
        order, ranges = _in_rounds(self.rank[heads], messages[heads], made[heads], is_missing)
        if len(order) < len(heads):
            raise ValueError(f"schedule {self.schedule.name} stops for ever, {len(order)} of {len(heads)} pieces done")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        before = number[_before(self.rank[heads])]
        sender = np.full(self.num_events, 2 * len(order))  # of no message
        sender[made[heads]] = 2 * number[:, None] + np.arange(2)
        sender[[_THERE, _UNSEEN]] = 2 * len(order)
        is_work = ~self.is_collective
        rows, pairs = self._rows()
        rounds = []
        for first, last in ranges:
            here = order[first:last]
            turns = [some[some >= 0] for some in standing[here].T]
            issued = tuple(collectives.after(before, some) for some in turns if len(some))
            rounds.append(Round(first, last, bool((waits[heads[here]] != _THERE).any()), issued))
        return Rounds(
            num_stages=self.schedule.num_stages, num_marks=self.messages, rounds=tuple(rounds),
            before=before[order], messages=sender[messages[heads]][order], borders=borders[heads][order],
            waits=waits[heads][order], rows=rows[is_work], begins=np.flatnonzero(begins[is_work]),
            order=order, ranks=np.flatnonzero(np.diff(self.rank[is_work], prepend=-1)), pairs=pairs,
        )  # fmt: skip

    def _messages(self) -> tuple[Ints, Ints, Ints]:
        """The message that each action waits for, the one that it makes, and the border that this passes; each by
        product.

        Behind the last border there is none, which is said of no message.
        """
        stage, num_stages, placement = self.stage, self.schedule.num_stages, self.schedule.placement
        one_stage = self.schedule.num_microbatches
        copy = np.array([*(placement.copy_of or (0,) * one_stage), 0])[self.microbatch]
        holders, rank = np.array(placement.holders), self.rank[self.at]
        waits, makes, borders = (np.full((len(self.kind), 2), nothing) for nothing in (_THERE, _UNSEEN, num_stages - 1))

        def is_elsewhere(other: Ints) -> Bools:
            """True if another stage is there, and on another rank."""
            inside = (other >= 0) & (other < num_stages)
            mask: Bools = inside & (holders[copy, np.clip(other, 0, num_stages - 1)] != rank)
            return mask

        for product in Product:
            travels = TRAVELS[product]
            takers = [kind for kind, needs in NEEDS.items() if Need(product, -travels) in needs]
            takes = self._is_of(takers) & is_elsewhere(stage - travels)
            gives = self._is_of([kind for kind in MAKES if MAKES[kind] is product]) & is_elsewhere(stage + travels)
            made = self.messages + (product * num_stages + stage) * one_stage + self.microbatch
            waits[self.at[takes], product] = (made - travels * one_stage)[takes]
            makes[self.at[gives], product] = made[gives]
            borders[self.at[gives], product] = (stage + min(travels, 0))[gives]
        return waits, makes, borders

    def _is_of(self, kinds: Sequence[Kind]) -> Bools:
        """Mask of the parts of some kinds."""
        mask: Bools = np.isin(self.part, [_NUMBER[kind] for kind in kinds])
        return mask

    def _waits(self) -> Ints:
        """The marks that each action waits for: its parameters', or at a step its rank's reductions. Of no columns
        where there are no collectives."""
        marks = np.full((len(self.kind), 2 * self.is_collective.any()), _THERE)
        if not marks.size:
            return marks
        reads = np.isin(self.part, (_F, _I, _B, _C)) & (self.part == _GATHER).any()
        is_second = (np.diff(self.at, prepend=-1) == 0).astype(int)
        place = self.gathered + self.rank[self.at] * self.schedule.num_stages + self.stage
        marks[self.at[reads], is_second[reads]] = place[reads]
        step = self.at[self.part == _STEP]
        marks[step, 0] = self.reduced + self.rank[step]
        return marks

    def _collectives(self, piece: Ints, num_pieces: int) -> tuple[Collectives, Ints]:
        """All collectives, and by piece those that stand before it, in columns; -1 where there is none.

        `behind` is the piece that comes next, since of that is known which one comes before.
        """
        where = np.flatnonzero(self.is_collective[self.at])
        at, stage, is_reduction = self.at[where], self.stage[where], self.part[where] == _REDUCE
        rank, num_stages = self.rank[at], self.schedule.num_stages
        place = rank * num_stages + stage
        mark = np.where(is_reduction, self.reduced + rank, self.gathered + place)
        turn = np.arange(len(at)) - np.searchsorted(piece[at], piece[at])
        columns = np.full((num_pieces, 1 + turn.max(initial=-1)), -1)
        columns[piece[at], turn] = np.arange(len(at))
        return Collectives(rank, piece[at], np.where(is_reduction, stage, num_stages + stage), mark), columns

    def _rows(self) -> tuple[Ints, Ints]:
        """(the row of costs of each action, those of the parts of each pair that differs)."""
        num_stages = self.schedule.num_stages
        of_part = self.part * num_stages + np.maximum(self.stage, 0)
        rows = np.empty_like(self.kind)
        rows[self.at] = of_part
        paired = np.flatnonzero(self.kind == _PAIR)
        first = np.searchsorted(self.at, paired)
        pairs, which = np.unique(np.column_stack([of_part[first], of_part[first + 1]]), axis=0, return_inverse=True)
        rows[paired] = (_STEP + 1) * num_stages + which.reshape(-1)
        return rows, pairs


def _before(rank: Ints) -> Ints:
    """The piece before each on the same rank, of pieces in the order of ranks; before the first stands the last."""
    before = np.arange(len(rank)) - 1
    firsts = np.flatnonzero(np.diff(rank, prepend=-1))
    before[firsts] = np.append(firsts[1:], len(rank)) - 1
    return before


def _in_rounds(rank: Ints, needs: Ints, makes: Ints, is_missing: Bools) -> tuple[Ints, list[tuple[int, int]]]:
    """Pieces by round, as long as some can be done, and the ranges of them that are rounds.

    A rank does its own in order, each when no event is missing that it needs; those that it makes then are not.
    """
    num_pieces = len(rank)
    needs = np.vstack([needs, np.full((1, needs.shape[1]), _NEVER)])
    ends = np.searchsorted(rank, np.arange(1, rank[-1] + 2))
    at = np.append(0, ends[:-1])
    done: list[Ints] = [np.empty(0, np.int64)]
    ranges: list[tuple[int, int]] = []
    first = 0
    while True:
        next_one = np.where(at < ends, at, num_pieces)
        can = np.flatnonzero(~is_missing[needs[next_one]].any(axis=1))
        if not len(can):
            return np.concatenate(done), ranges
        now = next_one[can]
        done.append(now)
        ranges.append((first, first + len(now)))
        first += len(now)
        is_missing[makes[now]] = False
        at[can] += 1
