"""The waits of ranks and their causes: a rank's time is cut without a gap into computing and waiting.

    warm-up        before its first computation of a step
    dependency     another rank has not yet computed the input
    communication  the input is computed, and its message is in transit
    drain          after its last computation, until the last rank has ended the step

Each question is asked of all ranks at once: the actions of a step have numbers, one rank after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import numpy as np

from shardwright.layers.arrays import Array
from shardwright.schedule.action import COMPUTE, Kind
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, Product
from shardwright.schedule.schedule import Program
from shardwright.simulate.action_columns import step_actions


class Cause(StrEnum):
    """The reason why a rank does not compute."""

    WARM_UP = "warm-up"
    COMMUNICATION = "communication"
    DEPENDENCY = "dependency"
    DRAIN = "drain"


CAUSES = tuple(Cause)  # by the number that columns have of them
_WARM_UP, _COMMUNICATION, _DEPENDENCY, _DRAIN = map(CAUSES.index, CAUSES)


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of a rank's compute in order, as columns: the number of the cause, the start and the end."""

    cause: Array
    start: Array
    end: Array


def waits_by_rank(program: Program, starts: Sequence[Array], ends: Sequence[Array], num_steps: int) -> list[Waits]:
    """The waits of each rank, cut where their cause changes. `starts` and `ends` have the times of the actions of all
    steps of a rank."""
    return _Explained(program, starts, ends, num_steps).waits()


class _Explained:
    """All times, in tables that explain a wait.

    `starts` and `ends` are by step and number of the action. For each step, by product and stage x microbatches +
    microbatch: the time at which the product was made, and at which it arrived. 0 if it never was.
    """

    def __init__(self, program: Program, starts: Sequence[Array], ends: Sequence[Array], num_steps: int) -> None:
        self._program, self._m, self._actions = program, program.num_microbatches, step_actions(program)
        self._starts, self._ends = (self._actions.by_step(rows, num_steps) for rows in (starts, ends))
        self._end_of_step = self._ends.max(axis=1, initial=0.0)
        self._made, self._arrived = np.zeros((2, len(Product), num_steps, program.num_stages * self._m))
        columns = self._actions.columns
        for product in Product:
            makers = columns.of_kinds(*(kind for kind in MAKES if MAKES[kind] is product))
            receives = columns.of_kinds(MESSAGES[product][1])
            self._made[product][:, makers.pair] = self._ends[:, makers.at]
            self._arrived[product][:, receives.pair] = self._ends[:, receives.at]
        self._complete = np.zeros((num_steps, program.num_stages))  # when a stage's gradients are, in all its copies
        additions = columns.of_kinds(Kind.BACKWARD, Kind.WEIGHT_GRAD)
        for complete, ended in zip(self._complete, self._ends, strict=True):
            np.maximum.at(complete, additions.stage, ended[additions.at])

    def waits(self) -> list[Waits]:
        """The waits of each rank."""
        actions, (num_steps, num_ranks) = self._actions, (len(self._ends), len(self._program.ranks))
        rank_of_work = actions.rank_of(actions.work)
        in_order = np.argsort(np.tile(rank_of_work, num_steps), kind="stable")  # all steps of a rank, then of the next
        step, action = np.divmod(in_order, max(1, len(actions.work)))
        action, rank = actions.work[action], rank_of_work[action]
        began, ended = self._starts[step, action], self._ends[step, action]
        free = np.where(np.diff(rank, prepend=-1) > 0, 0.0, np.roll(ended, 1))
        last_free = np.zeros(num_ranks)
        is_last = np.diff(rank, append=num_ranks) > 0
        last_free[rank[is_last]] = ended[is_last]
        places = np.flatnonzero(began > free)
        step, action, rank, began, free = (column[places] for column in (step, action, rank, began, free))
        # Each wait is for a computation, for its message, and again for others, between four moments.
        inputs = (table[step, action] for table in self._inputs())
        computed, arrived = (np.maximum(moments, free) for moments in inputs)
        causes = np.tile([_DEPENDENCY, _COMMUNICATION, _DEPENDENCY], (len(places), 1))
        self._explain_ends((step, action, rank, free), (computed, arrived), causes)
        computed = np.minimum(computed, began)
        arrived = np.clip(arrived, computed, began)
        moments = np.stack([free, computed, arrived, began], -1)
        return _merged(
            np.append(np.repeat(rank, 3), np.arange(num_ranks)),
            np.append(causes.ravel(), np.full(num_ranks, _DRAIN)),
            np.append(moments[:, :-1].ravel(), last_free),
            np.append(moments[:, 1:].ravel(), np.full(num_ranks, self._end_of_step.max(initial=0.0))),
        )

    def _explain_ends(
        self, waits: tuple[Array, Array, Array, Array], inputs: tuple[Array, Array], causes: Array
    ) -> None:
        """Write the causes of waits for updates and for a step's first computation, and when their inputs were computed
        and had arrived. `waits` are the steps, the actions, the ranks, and when a rank was free."""
        (firsts, lasts), reductions, (computed, arrived) = (
            self._actions.outer_computations,
            self._actions.reductions,
            inputs,
        )
        for place in np.flatnonzero(np.isin(waits[1], [*firsts.tolist(), *reductions])).tolist():
            step, n, rank, free_from = (column[place].item() for column in waits)
            if n in reductions:
                causes[place, ::2] = _DRAIN if n > lasts[rank] else _DEPENDENCY
                computed[place], arrived[place] = self._reduced(step, reductions[n], free_from)
            else:  # the last ranks end the step before, then the first ones begin this step
                causes[place] = _DRAIN, _WARM_UP, _WARM_UP
                ended = float(self._end_of_step[step - 1]) if step else 0.0
                computed[place], arrived[place] = max(ended, free_from), inf

    def _inputs(self) -> tuple[Array, Array]:
        """When the last input from another stage was computed, and when all inputs had arrived, parameters included; by
        step and action."""
        columns, (computed, arrived) = self._actions.columns, np.zeros((2, *self._ends.shape))
        for kind, needs in NEEDS.items():
            takers = columns.of_kinds(kind)
            for need in needs if len(takers.at) else ():
                if need.stage:
                    _note_later(arrived, takers.at, self._arrived[need.product][:, takers.pair])
                    stage = takers.stage + need.stage
                    made = takers.where((stage >= 0) & (stage < self._program.num_stages))
                    _note_later(computed, made.at, self._made[need.product][:, made.pair + need.stage * self._m])
        gathers, readers = columns.of_kinds(Kind.GATHER), columns.of_kinds(*COMPUTE - {Kind.WEIGHT_GRAD})
        for stage in sorted(set(gathers.stage.tolist())):  # the last gather of a rank before an action serves it
            read_at, gathered_at = readers.at[readers.stage == stage], gathers.at[gathers.stage == stage]
            last = np.searchsorted(gathered_at, read_at) - 1
            is_served = (last >= 0) & (self._actions.rank_of(gathered_at[last]) == self._actions.rank_of(read_at))
            _note_later(arrived, read_at[is_served], self._ends[:, gathered_at[last[is_served]]])
        return computed, arrived

    def _reduced(self, step: int, reductions: tuple[list[int], list[int]], free_from: float) -> tuple[float, float]:
        """When the gradients that an update waits for were complete, and when they were reduced."""
        numbers, stages = reductions
        complete, reduced = self._complete[step, stages].tolist(), self._ends[step, numbers].tolist()
        return max([free_from, *complete]), max([free_from, *reduced])


def _merged(rank: Array, cause: Array, start: Array, end: Array) -> list[Waits]:
    """The waits of each rank that last, where adjacent ones with one cause are one. Columns are in the order of each
    rank's waits."""
    num_ranks = int(rank.max(initial=-1)) + 1
    lasting = np.flatnonzero(start < end)
    lasting = lasting[np.argsort(rank[lasting], kind="stable")]
    rank, cause, start, end = rank[lasting], cause[lasting], start[lasting], end[lasting]
    goes_on = (rank[1:] == rank[:-1]) & (cause[1:] == cause[:-1]) & (start[1:] == end[:-1])
    is_first, is_last = np.append(True, ~goes_on)[: len(cause)], np.append(~goes_on, True)[: len(cause)]
    bounds = np.searchsorted(rank[is_first], np.arange(1, num_ranks))
    columns = (np.split(column, bounds) for column in (cause[is_first], start[is_first], end[is_last]))
    return [Waits(*one) for one in zip(*columns, strict=True)]


def _note_later(table: Array, actions: Array, moments: Array) -> None:
    """Write moments, by step and action, into a table where they are later than what it has."""
    table[:, actions] = np.maximum(table[:, actions], moments)
