"""A memo of costs: a layer's cost is computed once for all plans that have the same layer.

A search prices its plans in many calls that differ in schedule and in who shares what, and their layers are few. A memo
holds what was computed for these, by the numbers of a plan from which it follows, and is asked again.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.rank_order import ORDERS
from shardwright.workload.arrays import Array, distinct
from shardwright.workload.query import PlanGrid, Run
from shardwright.workload.stage_contents import PipelineRanks, different_ranks

Value = TypeVar("Value")
Columns = Callable[[PlanGrid], tuple[Array, ...]]


# The numbers and the other fields of a plan that decide the cost of its layers: the keys of a memo.


def layer_words(grid: PlanGrid) -> tuple[Any, ...]:
    """The fields of a plan besides its numbers that decide what a layer computes, sends and keeps, but for its
    recomputation."""
    return grid.precision, grid.cp_method, grid.dispatch


def plain_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The whole numbers from which follows what a piece without experts computes, sends and keeps. `grid` is of
    arrays."""
    flags = (grid.sequence_parallel, grid.offload_activations)
    return (
        grid.tp,
        grid.cp,
        grid.microbatch,
        grid.world,
        *(flag.astype(np.int64) for flag in flags),
        *_order_columns(grid),
    )


def _order_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers that say where those lie who exchange something in every layer, where others may lie between them."""
    if all(ORDERS[number].keeps_layers_near for number, _ in grid.orders):
        return ()
    return grid.order_number, grid.dp, grid.pp, grid.block


def layer_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that determine what a layer of any kind costs."""
    return *plain_columns(grid), grid.ep, grid.expert_tp


def shard_words(grid: PlanGrid) -> tuple[Any, ...]:
    """The fields besides its numbers that decide how the parameters of a layer come together under ZeRO-3."""
    return grid.precision, grid.reduce_bytes


def shard_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers that determine how the parameters of a layer come together under ZeRO-3. `grid` is of arrays."""
    is_sharded, has_orders = grid.zero == 3, any(number for number, _ in grid.orders)
    return (
        grid.tp, grid.ep, grid.expert_tp,
        is_sharded * grid.cp, is_sharded * grid.dp, is_sharded * (1 + grid.zero_ranks),
        grid.offload_parameters.astype(np.int64), is_sharded * grid.num_copies,
        *((is_sharded * grid.order_number, is_sharded * (grid.order_number > 0) * grid.pp) if has_orders else ()),
    )  # fmt: skip


class Memo:
    """Tables of what was computed. It is for one job and one set of constants, and only grows."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._values: dict[Hashable, Any] = {}
        self._keys: dict[Columns, dict[tuple[int, ...], int]] = {}
        self._last = _Last(PlanGrid())

    def ranks(self, shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
        """`different_ranks` of these plans; once for a step's time and for its memory."""
        last = self._of(grid)
        if last.ranks is None:
            last.ranks = different_ranks(shape, grid)
        return last.ranks

    def held(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array]:
        """The parameters of these ranks."""
        last = self._of(grid)
        if last.held is None:
            last.held = self.ranks(shape, grid).parameters(shape, grid)
        return last.held

    def once(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The result of `compute` when it was first asked for under a key. The key must name all on which the result
        depends."""
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]  # type: ignore[no-any-return]

    def rows(self, name: str, run: Run, words: Hashable, columns: Columns, compute: Callable[[Run], Array]) -> Array:
        """The results of `compute` for each plan of a run in arrays, in shape (values, plans).

        They depend on `columns` of its grid, which are whole numbers, on `words` of it, and on all else in the run;
        `compute` is asked for plans that differ in columns, and may ask for rows of other names itself.
        """
        last = self._of(run.grid)
        if columns not in last.distinct:
            of_each = columns(run.grid)
            firsts, which = distinct(of_each)
            known = self._keys.setdefault(columns, {})
            numbers = zip(*(column[firsts].tolist() for column in of_each), strict=True)
            keys = np.array([known.setdefault(of_one, len(known)) for of_one in numbers])
            last.distinct[columns] = firsts, keys, keys[which]
        firsts, keys, of_plans = last.distinct[columns]
        table = self._tables.setdefault((name, words, run.setting), _Table())
        new = table.unknown(keys)
        if len(new):
            table.add(keys[new], compute(replace(run, grid=run.grid.at(firsts[new]))))
            self._last = last
        return table.values[:, table.place[of_plans]]

    def _of(self, grid: PlanGrid) -> "_Last":
        if self._last.grid is not grid:
            self._last = _Last(grid)
        return self._last


@dataclass
class _Last:
    """The results for the plans that were asked for last: a row of each distinct combination, its key, and that of each
    plan."""

    grid: PlanGrid
    ranks: PipelineRanks | None = None
    held: tuple[Array, Array] | None = None
    distinct: dict[Columns, tuple[Array, Array, Array]] = field(default_factory=dict)


class _Table:
    """Columns of values, and the place of each key's; -1 where there is none."""

    def __init__(self) -> None:
        self.place: Array = np.zeros(0, np.int64)
        self.values: Array = np.zeros((0, 0))

    def unknown(self, keys: Array) -> Array:
        """Where in some keys those are that have no values."""
        more = int(keys.max()) + 1 - len(self.place)
        if more > 0:
            self.place = np.concatenate((self.place, np.full(more, -1)))
        return np.flatnonzero(self.place[keys] < 0)

    def add(self, keys: Array, values: Array) -> None:
        """Values, (values, keys), of keys that have none."""
        first = self.values.shape[1]
        self.place[keys] = np.arange(first, first + len(keys))
        self.values = np.concatenate((self.values, values), axis=1) if first else values
