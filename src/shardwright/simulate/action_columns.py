"""The list of a rank as arrays, so that what is asked of millions of actions is asked of all at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.schedule.action import Action, Kind

Array = npt.NDArray[Any]

_NUMBER = {kind: number for number, kind in enumerate(Kind)}


@dataclass(frozen=True, eq=False)
class Columns:
    """Actions in order, of an overlapped pair both parts: the index in the list, the kind by number, the stage, and
    stage x microbatches + microbatch."""

    at: Array
    kind: Array
    stage: Array
    pair: Array

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

    def are_of(self, *kinds: Kind) -> Array:
        """A mask that is true where the action is of one of some kinds."""
        wanted = np.zeros(len(_NUMBER), bool)
        wanted[[_NUMBER[kind] for kind in kinds]] = True
        mask: Array = wanted[self.kind]
        return mask

    def of_kinds(self, *kinds: Kind) -> "Columns":
        """The columns of the actions of some kinds alone."""
        return self.where(self.are_of(*kinds))

    def where(self, mask: Array) -> "Columns":
        """The columns of some actions alone, chosen by a mask or by indices."""
        return Columns(self.at[mask], self.kind[mask], self.stage[mask], self.pair[mask])
