"""The actions of a rank, or of all ranks, as arrays, so that a question about millions of actions is one operation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter

import numpy as np

from shardwright.config.kept_results import kept_by_identity
from shardwright.layers.arrays import Array
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.schedule import Program

_NUMBER = {kind: number for number, kind in enumerate(Kind)}


@dataclass(frozen=True, eq=False)
class Columns:
    """Actions in order, with both parts of an overlapped pair: the index in the rank's list, the number of the kind,
    the stage, and stage x microbatches + microbatch."""

    at: Array
    kind: Array
    stage: Array
    pair: Array
    _of_kinds: dict[tuple[Kind, ...], "Columns"] = field(default_factory=dict, repr=False)
    _actions_of: dict[tuple[Kind, ...], Array] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, row: Sequence[Action], num_microbatches: int) -> "Columns":
        """The columns of a rank's list."""
        is_paired = np.fromiter(map(bool, map(itemgetter(4), row)), bool, len(row))
        parts = [part for action in row for part in action.parts or (action,)] if is_paired.any() else row
        kinds, stages, microbatches, _, _ = zip(*parts, strict=True) if parts else ((),) * 5
        stage = np.array(stages, np.int64)
        return cls(
            at=np.repeat(np.arange(len(row)), 1 + is_paired),
            kind=np.fromiter(map(_NUMBER.__getitem__, kinds), np.int8, len(kinds)),
            stage=stage,
            pair=stage * num_microbatches + np.array(microbatches, np.int64),
        )

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds that occur."""
        return [kind for kind, number in _NUMBER.items() if (self.kind == number).any()]

    @cached_property
    def has_pairs(self) -> bool:
        """True if some actions are overlapped pairs."""
        return bool((np.diff(self.at) == 0).any())

    def are_of(self, *kinds: Kind) -> Array:
        """A mask that is True for actions of the given kinds."""
        is_wanted = np.zeros(len(_NUMBER), bool)
        is_wanted[[_NUMBER[kind] for kind in kinds]] = True
        mask: Array = is_wanted[self.kind]
        return mask

    def of_kinds(self, *kinds: Kind) -> "Columns":
        """The columns of only the actions of the given kinds, which are kept: most questions about a rank need them."""
        if kinds not in self._of_kinds:
            self._of_kinds[kinds] = self.where(self.are_of(*kinds))
        return self._of_kinds[kinds]

    def actions_of(self, *kinds: Kind) -> Array:
        """The indices of the actions that have a part of the given kinds, each once and in order; kept, too."""
        if kinds not in self._actions_of:
            self._actions_of[kinds] = np.unique(self.of_kinds(*kinds).at)
        return self._actions_of[kinds]

    def where(self, mask: Array) -> "Columns":
        """The columns of only some actions, chosen by a mask or by indices."""
        return Columns(self.at[mask], self.kind[mask], self.stage[mask], self.pair[mask])


@dataclass(frozen=True, eq=False)
class StepActions:
    """The actions of a step on all ranks: their columns one behind the other, with the number of each action in place
    of its index. `firsts` are the first numbers of the ranks, and behind them the number of actions. `reductions` are
    those that each update waits for: their numbers, and the stages all of whose gradients they reduce."""

    columns: Columns
    firsts: Array
    reductions: dict[int, tuple[list[int], list[int]]]

    @cached_property
    def work(self) -> Array:
        """The numbers of computations and updates, in order."""
        return self.columns.actions_of(*COMPUTE, Kind.STEP)

    @cached_property
    def outer_computations(self) -> tuple[Array, Array]:
        """The first and the last computation of each rank; -1 of a rank without one."""
        computations = self.columns.actions_of(*COMPUTE)
        bounds, padded = np.searchsorted(computations, self.firsts), np.append(computations, -1)
        has_some = np.diff(bounds) > 0
        first, last = (np.where(has_some, padded[at], -1) for at in (bounds[:-1], bounds[1:] - 1))
        return first, last

    def rank_of(self, actions: Array) -> Array:
        """The ranks of some actions."""
        ranks: Array = np.searchsorted(self.firsts, actions, side="right") - 1
        return ranks

    def by_step(self, moments: Sequence[Array], num_steps: int) -> Array:
        """Moments by step and number of the action, from those of each rank, which has all its steps in order."""
        return np.concatenate([row.reshape(num_steps, -1) for row in moments], 1)


@partial(kept_by_identity, most=4)  # a page asks for many timelines of one program
def columns_by_rank(program: Program) -> tuple[Columns, ...]:
    """The actions of each rank, as columns."""
    return tuple(Columns.of(row, program.num_microbatches) for row in program.ranks)


@partial(kept_by_identity, most=4)
def step_actions(program: Program) -> StepActions:
    """The actions of a step of a program on all ranks."""
    by_rank, firsts = columns_by_rank(program), np.cumsum([0, *map(len, program.ranks)])
    columns = Columns(
        at=np.concatenate([first + columns.at for first, columns in zip(firsts[:-1], by_rank, strict=True)]),
        kind=np.concatenate([columns.kind for columns in by_rank]),
        stage=np.concatenate([columns.stage for columns in by_rank]),
        pair=np.concatenate([columns.pair for columns in by_rank]),
    )
    reductions: dict[int, tuple[list[int], list[int]]] = {}
    for first, row in zip(firsts[:-1].tolist(), program.ranks, strict=True):
        pending, stages = list[int](), list[int]()  # since the update before
        for number, action in enumerate(row, first):
            if action.kind is Kind.REDUCE:
                pending.append(number)
                stages += [action.stage] if action.microbatch < 0 else []
            elif action.kind is Kind.STEP:
                reductions[number] = pending, stages
                pending, stages = [], []
    return StepActions(columns, firsts, reductions)
