"""What a layer of a plan costs is computed once for all plans that have the same layer.

A search prices its plans in many calls that differ in schedule and in who shares what, and their layers are few. A memo
holds what was computed for these, by the numbers of a plan from which it follows, and is asked again.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.workload.arrays import Array, distinct
from shardwright.workload.ranks import Ranks, different_ranks
from shardwright.workload.shape import Cut, Run, Shape


class Memo:
    """Tables of what was computed. It is for one set of constants, and only grows."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._last = _Last(Cut())

    def ranks(self, shape: Shape, cut: Cut) -> Ranks:
        """`different_ranks` of these plans; once for a step's time and for its memory."""
        last = self._of(cut)
        if last.ranks is None:
            last.ranks = different_ranks(shape, cut)
        return last.ranks

    def rows(
        self, name: str, run: Run, words: Cut, columns: Callable[[Cut], tuple[Array, ...]], of: Callable[[Run], Array]
    ) -> Array:
        """What `of` says of each plan of a run in arrays, in shape (values, plans).

        It follows from `columns` of its cut, which are whole numbers, and from the rest of the run with `words` as the
        cut; `of` is asked for plans that differ in these.
        """
        last = self._of(run.cut)
        if columns not in last.distinct:
            last.distinct[columns] = distinct(columns(run.cut))
        found, which = last.distinct[columns]
        table = self._tables.setdefault((name, replace(run, cut=words)), _Table())
        numbers = list(zip(*(column[found].tolist() for column in columns(run.cut)), strict=True))
        place = table.place(numbers, lambda new: of(replace(run, cut=run.cut.at(found[new]))))
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
    distinct: dict[Callable[[Cut], tuple[Array, ...]], tuple[Array, Array]] = field(default_factory=dict)


class _Table:
    """Columns of values, by the numbers from which they follow."""

    def __init__(self) -> None:
        self.columns: dict[tuple[int, ...], int] = {}
        self.values: Array = np.zeros((0, 0))

    def place(self, numbers: list[tuple[int, ...]], of: Callable[[list[int]], Array]) -> Array:
        """Where the values of some numbers, all different, are; `of` makes those of the indices that are new."""
        new = [index for index, key in enumerate(numbers) if key not in self.columns]
        if new:
            made = of(new)
            self.values = np.concatenate((self.values, made), axis=1) if self.columns else made
            for index in new:
                self.columns[numbers[index]] = len(self.columns)
        return np.array([self.columns[key] for key in numbers])
