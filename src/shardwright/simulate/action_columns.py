"""The actions of a rank as arrays, so that a question about millions of actions is one operation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.schedule.action import Action, Kind

Array = npt.NDArray[Any]

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
