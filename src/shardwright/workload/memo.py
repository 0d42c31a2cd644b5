"""What a layer of a plan costs is computed once for all plans that have the same layer.

A search prices its plans in many calls that differ in schedule and in who shares what, and their layers are few. A memo
holds what was computed for these, by the numbers of a plan from which it follows, and is asked again.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from shardwright.workload.arrays import Array, distinct
from shardwright.workload.ranks import Ranks, different_ranks
from shardwright.workload.shape import Cut, Run, Shape

Value = TypeVar("Value")


class Memo:
    """Tables of what was computed. It is for one job and one set of constants, and only grows."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._values: dict[Hashable, Any] = {}
        self._last = _Last(Cut())

    def ranks(self, shape: Shape, cut: Cut) -> Ranks:
        """`different_ranks` of these plans; once for a step's time and for its memory."""
        last = self._of(cut)
        if last.ranks is None:
            last.ranks = different_ranks(shape, cut)
        return last.ranks

    def once(self, key: Hashable, of: Callable[[], Value]) -> Value:
        """What `of` said when it was first asked under a key, which must say all that it follows from."""
        if key not in self._values:
            self._values[key] = of()
        return self._values[key]  # type: ignore[no-any-return]

    def rows(
        self, name: str, run: Run, words: Hashable, columns: Callable[[Cut], tuple[Array, ...]],
        of: Callable[[Run], Array],
    ) -> Array:  # fmt: skip
        """What `of` says of each plan of a run in arrays, in shape (values, plans).

        It follows from `columns` of its cut, which are whole numbers, from `words` of it, and from all else in the run;
        `of` is asked for plans that differ in columns, and may ask for rows of other names itself.
        """
        last = self._of(run.cut)
        if columns not in last.distinct:
            of_each = columns(run.cut)
            found, which = distinct(of_each)
            last.distinct[columns] = found, which, list(zip(*(c[found].tolist() for c in of_each), strict=True))
        found, which, numbers = last.distinct[columns]
        table = self._tables.setdefault((name, words, run.setting), _Table())
        place = table.place(numbers, lambda new: of(replace(run, cut=run.cut.at(found[new]))))
        self._last = last
        return table.values[:, place[which]]

    def _of(self, cut: Cut) -> "_Last":
        if self._last.cut is not cut:
            self._last = _Last(cut)
        return self._last


@dataclass
class _Last:
    """What follows from the numbers of the plans that were asked for last."""

    cut: Cut
    ranks: Ranks | None = None
    distinct: dict[Callable[[Cut], tuple[Array, ...]], tuple[Array, Array, list[tuple[int, ...]]]] = field(
        default_factory=dict
    )


class _Table:
    """Columns of values, by the numbers from which they follow."""

    def __init__(self) -> None:
        self.columns: dict[tuple[int, ...], int] = {}
        self.values: Array = np.zeros((0, 0))

    def place(self, numbers: list[tuple[int, ...]], of: Callable[[list[int]], Array]) -> Array:
        """Where the values of some numbers, all different, are; `of` makes those of the indices that are new."""
        places = [self.columns.get(key, -1) for key in numbers]
        new = [index for index, place in enumerate(places) if place < 0]
        if new:
            made = of(new)
            self.values = np.concatenate((self.values, made), axis=1) if self.columns else made
            for index in new:
                self.columns[numbers[index]] = places[index] = len(self.columns)
        return np.array(places)
