"""The order of work of a schedule, laid out in rounds for batched_timing.py: all actions as columns of numbers."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from shardwright.config.phrase import say
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.dependencies import MAKES, NEEDS, TRAVELS, Need, Product
from shardwright.schedule.schedule import Schedule
from shardwright.simulate.batched_timing import Bools, Collectives, Ints, Round, Rounds

# Rows of a table of costs come in blocks of stages, in this order; C takes as long as F.
_F, _I, _W, _B, _C, _STEP, _REDUCE, _GATHER, _PAIR = range(9)
_NUMBER = {
    Kind.FORWARD: _F,
    Kind.INPUT_GRAD: _I,
    Kind.WEIGHT_GRAD: _W,
    Kind.BACKWARD: _B,
    Kind.RECOMPUTE: _C,
    Kind.STEP: _STEP,
    Kind.REDUCE: _REDUCE,
    Kind.GATHER: _GATHER,
    Kind.OVERLAP: _PAIR,
}
# Events: one present from the start, one that never occurs, one that nobody waits for; then marks, then messages.
_THERE, _NEVER, _UNSEEN, _MARKS = range(4)


def rounds_of(schedule: Schedule, has_collectives: bool) -> Rounds:
    """Lay out a schedule that drains, with its updates and without messages (`training_order`).

    Without `has_collectives` these are left out: they take no time. The layout does not join the reductions of the two
    copies of a stage: that delays no end of a step, because their ranks reduce in the same order. It assumes that each
    rank's own list is in order; ValueError if a rank waits for something that can never come.
    """
    return _Layout(schedule, has_collectives).rounds()


class _Layout:
    """The actions of all ranks as columns, one rank after the other, with both parts of pairs. Events are numbers."""

    def __init__(self, schedule: Schedule, has_collectives: bool) -> None:
        assert schedule.weights == "current", f"{schedule.name} has no end of a step"
        self.schedule = schedule
        left_out = {Kind.RELEASE} if has_collectives else {Kind.RELEASE, Kind.REDUCE, Kind.GATHER}
        # Fields of hundreds of thousands of actions: each is read by its place, without a call of Python.
        rows = [[action for action in row if action[0] not in left_out] for row in schedule.ranks]
        actions = list(chain.from_iterable(rows))
        self.rank = np.repeat(np.arange(len(rows)), list(map(len, rows)))
        self.kind = _kinds(actions)
        is_paired = self.kind == _PAIR
        self.at = np.repeat(np.arange(len(actions)), 1 + is_paired)  # the action of each part
        parts = [part for action in actions for part in action[4] or (action,)] if is_paired.any() else actions
        self.part = _kinds(parts) if is_paired.any() else self.kind
        self.stage, self.microbatch = (
            np.fromiter(map(itemgetter(place), parts), np.int64, len(parts)) for place in (1, 2)
        )
        self.is_collective = (self.kind == _REDUCE) | (self.kind == _GATHER)
        # Marks: by (rank, stage) for gathered parameters, by rank for the end of its reductions. Messages: by product
        # and by (stage, microbatch) of the action that makes them.
        self.gathered, self.reduced = _MARKS, _MARKS + len(rows) * schedule.num_stages
        self.messages = self.reduced + len(rows)
        self.num_events = self.messages + 2 * schedule.num_stages * schedule.num_microbatches

    def rounds(self) -> Rounds:
        """The work in rounds."""
        messages, made_messages, borders = self._messages()
        waits = self._waits()
        begins = np.ones(len(self.kind), bool)
        begins[1:] = (self.rank[1:] != self.rank[:-1]) | self.is_collective[:-1]
        begins |= (
            (messages != _THERE).any(axis=1) | (waits != _THERE).any(axis=1) | (made_messages != _UNSEEN).any(axis=1)
        )
        begins &= ~self.is_collective
        heads = np.flatnonzero(begins)
        num_begun = np.cumsum(begins)  # up to an action; for a collective, the number of the piece after it
        collectives, standing = self._collectives(num_begun, len(heads))
        is_missing = np.zeros(self.num_events, bool)
        is_missing[self.messages :] = is_missing[_NEVER] = True
        order, ranges = _in_rounds(self.rank[heads], messages[heads], made_messages[heads], is_missing)
        if len(order) < len(heads):
            raise ValueError(
                say(
                    "schedule {name} stops for ever, {count} of {total} pieces done",
                    name=self.schedule.name,
                    count=len(order),
                    total=len(heads),
                )
            )
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        predecessors = number[_before(self.rank[heads])]
        sender = np.full(self.num_events, 2 * len(order))  # the default is no message
        sender[made_messages[heads]] = 2 * number[:, None] + np.arange(2)
        sender[[_THERE, _UNSEEN]] = 2 * len(order)
        is_work = ~self.is_collective
        rows, pairs = self._rows()
        turns = self._turns()
        standing, has_waits = standing[order], (waits[heads[order]] != _THERE).any(axis=1)
        begun_at = [first for first, _ in ranges]
        issue, wait = (np.logical_or.reduceat(has, begun_at) for has in ((standing >= 0).any(axis=1), has_waits))
        rounds = []
        for (first, last), issues, waiting in zip(ranges, issue.tolist(), wait.tolist(), strict=True):
            in_turn = [indices[indices >= 0] for indices in standing[first:last].T] if issues else []
            issued = tuple(collectives.after(predecessors, indices) for indices in in_turn if len(indices))
            rounds.append(Round(first, last, waiting, issued))
        return Rounds(
            num_stages=self.schedule.num_stages, num_marks=self.messages, rounds=tuple(rounds),
            before=predecessors[order], messages=sender[messages[heads]][order], borders=borders[heads][order],
            waits=tuple(marks[order] for marks in waits[heads].T if np.any(marks != _THERE)),
            rows=rows[is_work], turns=turns[is_work], begins=np.flatnonzero(begins[is_work]),
            order=order, ranks=np.flatnonzero(np.diff(self.rank[is_work], prepend=-1)), pairs=pairs,
        )  # fmt: skip

    def _turns(self) -> Ints:
        """The place of each action's microbatch among those of its copy of the stages; of pairs, of the first part."""
        places, num_of_copy = [-1] * self.schedule.num_microbatches, Counter[int]()
        for microbatch, copy in enumerate(self.schedule.placement.copy_of or (0,) * self.schedule.num_microbatches):
            places[microbatch] = num_of_copy[copy]
            num_of_copy[copy] += 1
        return np.array([*places, -1])[self.microbatch[np.searchsorted(self.at, np.arange(len(self.kind)))]]

    def _messages(self) -> tuple[Ints, Ints, Ints]:
        """The message that each action waits for, the one that it makes, and the border that this one passes; each by
        product.

        There is no border after the last stage; an action without a message has the last border all the same.
        """
        stage, num_stages, placement = self.stage, self.schedule.num_stages, self.schedule.placement
        one_stage = self.schedule.num_microbatches
        copy = np.array([*(placement.copy_of or (0,) * one_stage), 0])[self.microbatch]
        holders, rank = np.array(placement.holders), self.rank[self.at]
        awaited, makes, borders = (
            np.full((len(self.kind), 2), nothing) for nothing in (_THERE, _UNSEEN, num_stages - 1)
        )

        def is_elsewhere(other_stage: Ints) -> Bools:
            """True if the other stage exists, and is on another rank."""
            inside = (other_stage >= 0) & (other_stage < num_stages)
            mask: Bools = inside & (holders[copy, np.clip(other_stage, 0, num_stages - 1)] != rank)
            return mask

        for product in Product:
            travels = TRAVELS[product]
            takers = [kind for kind, needs in NEEDS.items() if Need(product, -travels) in needs]
            takes = self._is_of(takers) & is_elsewhere(stage - travels)
            gives = self._is_of([kind for kind in MAKES if MAKES[kind] is product]) & is_elsewhere(stage + travels)
            messages = self.messages + (product * num_stages + stage) * one_stage + self.microbatch
            awaited[self.at[takes], product] = (messages - travels * one_stage)[takes]
            makes[self.at[gives], product] = messages[gives]
            borders[self.at[gives], product] = (stage + min(travels, 0))[gives]
        return awaited, makes, borders

    def _is_of(self, kinds: Sequence[Kind]) -> Bools:
        """A mask of the parts that are of some kinds."""
        is_of = np.zeros(len(_NUMBER), bool)
        is_of[[_NUMBER[kind] for kind in kinds]] = True
        mask: Bools = is_of[self.part]
        return mask

    def _waits(self) -> Ints:
        """The marks that each action waits for: the gathers of its parameters, or for a step its rank's reductions. No
        columns if there are no collectives."""
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
        """All collectives, and for each piece the numbers of those that are issued before it, in columns; -1 for none.

        `behind` is the next piece here, because the caller knows the piece before each piece.
        """
        indices = np.flatnonzero(self.is_collective[self.at])
        actions, stage, is_reduction = self.at[indices], self.stage[indices], self.part[indices] == _REDUCE
        rank, num_stages = self.rank[actions], self.schedule.num_stages
        place = rank * num_stages + stage
        mark = np.where(is_reduction, self.reduced + rank, self.gathered + place)
        turn = np.arange(len(actions)) - np.searchsorted(piece[actions], piece[actions])
        columns = np.full((num_pieces, 1 + turn.max(initial=-1)), -1)
        columns[piece[actions], turn] = np.arange(len(actions))
        return Collectives(rank, piece[actions], np.where(is_reduction, stage, num_stages + stage), mark), columns

    def _rows(self) -> tuple[Ints, Ints]:
        """(the row of costs of each action, the rows of the two parts of each distinct pair)."""
        num_stages = self.schedule.num_stages
        part_rows = self.part * num_stages + np.maximum(self.stage, 0)
        rows = np.empty_like(self.kind)
        rows[self.at] = part_rows
        paired = np.flatnonzero(self.kind == _PAIR)
        first_parts = np.searchsorted(self.at, paired)
        span = int(part_rows.max()) + 1
        codes, which = np.unique(part_rows[first_parts] * span + part_rows[first_parts + 1], return_inverse=True)
        rows[paired] = (_STEP + 1) * num_stages + which
        pairs = np.column_stack(np.divmod(codes, span))
        return rows, pairs


def _kinds(actions: Sequence[Action]) -> Ints:
    """The numbers of the kinds of actions."""
    return np.fromiter(map(_NUMBER.__getitem__, map(itemgetter(0), actions)), np.int64, len(actions))


def _before(rank: Ints) -> Ints:
    """The previous piece on the same rank; for the first piece the last. Pieces are in the order of ranks."""
    predecessors = np.arange(len(rank)) - 1
    firsts = np.flatnonzero(np.diff(rank, prepend=-1))
    predecessors[firsts] = np.append(firsts[1:], len(rank)) - 1
    return predecessors


def _in_rounds(
    rank: Ints, needed_events: Ints, made_events: Ints, is_missing: Bools
) -> tuple[Ints, list[tuple[int, int]]]:
    """The pieces by round, as long as some can be done, and the range of the pieces of each round.

    A rank does its own pieces in order, each when no needed event is missing; then the events that it makes are not.
    """
    num_pieces = len(rank)
    needed_events = np.vstack([needed_events, np.full((1, needed_events.shape[1]), _NEVER)])
    is_there = ~is_missing
    lasts = np.searchsorted(rank, np.arange(1, rank[-1] + 2)) - 1
    following = np.arange(1, num_pieces + 1)
    following[lasts] = num_pieces  # needs an event that never occurs
    next_pieces = np.append(0, lasts[:-1] + 1)
    done_pieces: list[Ints] = [np.empty(0, np.int64)]
    ranges: list[tuple[int, int]] = []
    num_done = 0
    while True:
        first_there, second_there = is_there.take(needed_events.take(next_pieces, 0).T)
        (ready_ranks,) = (first_there & second_there).nonzero()
        if not len(ready_ranks):
            return np.concatenate(done_pieces), ranges
        round_pieces = next_pieces.take(ready_ranks)
        done_pieces.append(round_pieces)
        ranges.append((num_done, num_done + len(round_pieces)))
        num_done += len(round_pieces)
        is_there[made_events.take(round_pieces, 0)] = True
        next_pieces[ready_ranks] = following.take(round_pieces)
