"""The times at which the steps of a schedule end, under many costs at once.

`schedule/timing.py` times each action of a program, one after the other. This file computes only the ends of steps, for
many plans that run in one order. `round_layout.py` lays out the same recurrence once for all of them, in rounds: in
each round every rank whose inputs are there does its next piece of work. A round is a few operations on arrays of shape
(its pieces, costs). Messages are not pieces of work: the result of a piece leaves by a link, in the order of the
pieces, and its receiver waits for it. An action that neither waits nor sends belongs to the piece before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.schedule.timing import Costs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_QUEUED = ("reduce", "gather")  # costs of collectives, in the order of their rows


class Collectives(NamedTuple):
    """Reductions and gathers that ranks issue after a piece of work, at most one each; a rank runs its own in a queue.

    `behind` is the number of the piece, and `row` the row of the cost, gathers after reductions; `mark` is the mark of
    the collective's end.
    """

    rank: Ints
    behind: Ints
    row: Ints
    mark: Ints

    def after(self, predecessors: Ints, indices: Ints) -> "Collectives":
        """Some of the collectives, if `behind` is the next piece; `predecessors` has the piece before each piece."""
        return Collectives(
            self.rank[indices], predecessors[self.behind[indices]], self.row[indices], self.mark[indices]
        )


class Round(NamedTuple):  # a tuple, because a layout has thousands
    """Pieces `first` to `last`, one each of some ranks, and the collectives issued before them.

    `waits` is True if some of the pieces wait for marks.
    """

    first: int
    last: int
    waits: bool
    issued: tuple[Collectives, ...]


@dataclass(frozen=True)
class Rounds:
    """An order of work. A piece of work is one action or several; pieces are numbered in the order of rounds.

    By piece: `before` is the previous piece on its rank (the last one for the first). `messages` has, by product, the
    message that it waits for: 2 n + product for the one that piece n sent. `borders` has, by product, the border
    between stages that its own message passes. `waits` are columns with the marks that it waits for, which are ends of
    collectives; pieces that are not pairs wait for one at most.
    By action, one rank after the other: `rows` has the row of its costs, `turns` the place of its microbatch among
    those of its copy of the stages, of pairs for the first part. `begins` are the actions that begin a piece, `order`
    maps pieces to these, `ranks` are the first actions of ranks. `pairs` are the rows of the parts of pairs.
    """

    num_stages: int
    num_marks: int
    rounds: tuple[Round, ...]
    before: Ints
    messages: Ints
    borders: Ints
    waits: tuple[Ints, ...]
    rows: Ints
    turns: Ints
    begins: Ints
    order: Ints
    ranks: Ints
    pairs: Ints

    def ends(self, costs: Sequence[Costs], num_steps: int = 1) -> Floats:
        """The ends of steps that run back to back, (steps, costs); the first step begins at 0. As in `play`, no rank
        waits for all others between two steps."""
        return self.played(costs, num_steps)[0]

    def played(self, costs: Sequence[Costs], num_steps: int = 1) -> tuple[Floats, Floats]:
        """(the result of `ends`, the ends of the pieces of the last step as (pieces, costs))."""
        num_costs, num_pieces = len(costs), len(self.order)
        action_s = self._table(costs)[self.rows]
        piece_s = np.add.reduceat(action_s, self.begins, axis=0)[self.order]
        made_s = action_s[self.begins][self.order]  # until the result of a piece leaves
        sent_s = _by_stage([cost.transfer for cost in costs], self.num_stages)[self.borders]
        queued_s = np.concatenate(
            [_by_stage([getattr(cost, name) for cost in costs], self.num_stages) for name in _QUEUED]
        )
        latency_s = np.array([cost.latency for cost in costs])
        ended = np.zeros((num_pieces, num_costs))
        link_free_s = np.zeros((num_pieces + 1, 2, num_costs))  # the time at which a rank's links are free again
        link_free_s[-1] = -np.inf  # no message
        departed_s, (forward_ids, backward_ids) = link_free_s.reshape(-1, num_costs), self.messages.T
        queue, marks = np.zeros((len(self.ranks), num_costs)), np.zeros((self.num_marks, num_costs))
        end_s = np.empty((num_steps, num_costs))
        for step in range(num_steps):
            for round_ in self.rounds:
                for issued in round_.issued:
                    begun = np.maximum(queue[issued.rank], ended[issued.behind])
                    queue[issued.rank] = marks[issued.mark] = begun + queued_s[issued.row]
                pieces = slice(round_.first, round_.last)
                predecessors = self.before[pieces]
                forward_s, backward_s = (
                    departed_s.take(forward_ids[pieces], 0),
                    departed_s.take(backward_ids[pieces], 0),
                )
                begun = np.maximum(forward_s, backward_s) + latency_s
                np.maximum(begun, ended.take(predecessors, 0), out=begun)
                if round_.waits:
                    for waits in self.waits:
                        np.maximum(begun, marks.take(waits[pieces], 0), out=begun)
                np.add(begun, piece_s[pieces], out=ended[pieces])
                begun += made_s[pieces]
                np.maximum(link_free_s.take(predecessors, 0), begun[:, None], out=link_free_s[pieces])
                link_free_s[pieces] += sent_s[pieces]
            end_s[step] = ended.max(axis=0)
        return end_s, ended

    def busy(self, costs: Sequence[Costs]) -> Floats:
        """The compute time of a step on the rank that computes longest, by costs."""
        return np.asarray(self.busy_by_rank(costs).max(axis=0))

    def busy_by_rank(self, costs: Sequence[Costs], is_counted: Bools | None = None) -> Floats:
        """The compute time of a step, (ranks, costs); of some actions if a mask of them is given."""
        action_s = self._table(costs)[self.rows]
        if is_counted is not None:
            action_s = action_s * is_counted[:, None]
        return np.asarray(np.add.reduceat(action_s, self.ranks, axis=0))

    def queued(self, costs: Sequence[Costs]) -> Floats:
        """Seconds that the collectives of the rank with the most of them take in a step, by costs."""
        queue_s = np.zeros((len(self.ranks), len(costs)))
        seconds = np.concatenate(
            [_by_stage([getattr(cost, name) for cost in costs], self.num_stages) for name in _QUEUED]
        )
        for round_ in self.rounds:
            for cost in round_.issued:
                queue_s[cost.rank] += seconds[cost.row]
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
    """A table (stages, costs), with 0 for stages without a value."""
    table = np.zeros((num_stages, len(values)))
    for column, seconds in enumerate(values):
        table[: len(seconds), column] = seconds
    return table
