"""A memo of costs: a layer's cost is computed once for all plans that have the same layer.

A search prices its plans in many calls that differ in schedule and in sharding, and these plans have few distinct
layers. A memo stores each result under the numbers of a plan that determine it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.rank_order import ORDERS
from shardwright.layers.arrays import Array, as_bytes, distinct
from shardwright.layers.query import PlanGrid, Run
from shardwright.layers.stage_contents import PipelineRanks, different_ranks

Value = TypeVar("Value")
Columns = Callable[[PlanGrid], tuple[Array, ...]]


# The numbers and the other fields of a plan that decide the cost of its layers: the keys of a memo.


def layer_words(grid: PlanGrid) -> tuple[Any, ...]:
    """The non-numeric fields of a plan that decide what a layer computes, sends and keeps, except its recomputation."""
    return grid.precision, grid.compute, grid.cp_method, grid.dispatch


def plain_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The integers that determine what a piece without experts computes, sends and keeps. `grid` has arrays."""
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
    """The numbers that place the ranks that exchange in every layer; none if no other ranks can lie between them."""
    if all(ORDERS[number].keeps_layers_near for number, _ in grid.orders):
        return ()
    return grid.order_number, grid.dp, grid.pp, grid.block


def layer_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that determine what a layer of any kind costs."""
    return *plain_columns(grid), grid.ep, grid.expert_tp


def shard_words(grid: PlanGrid) -> tuple[Any, ...]:
    """The non-numeric fields that decide how the parameters of a layer are gathered under ZeRO-3."""
    return grid.precision, grid.compute, grid.reduce_bytes


def shard_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers that determine how the parameters of a layer are gathered under ZeRO-3. `grid` has arrays."""
    is_sharded, has_orders = grid.zero == 3, any(number for number, _ in grid.orders)
    return (
        grid.tp,
        grid.ep,
        grid.expert_tp,
        is_sharded * grid.cp,
        is_sharded * grid.dp,
        is_sharded * (1 + grid.zero_ranks),
        grid.offload_parameters.astype(np.int64),
        is_sharded * grid.num_copies,
        is_sharded * (grid.num_copies > 1) * grid.pp,
        *((is_sharded * grid.order_number, is_sharded * (grid.order_number > 0) * grid.pp) if has_orders else ()),
    )


class Memo:
    """Tables of computed results. A memo is for one job and one set of constants, and only grows."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._values: dict[Hashable, Any] = {}
        self._keys: dict[Columns, dict[bytes, int]] = {}
        self._last = _Last(PlanGrid())

    def ranks(self, shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
        """The `different_ranks` of these plans; computed once for a step's time and for its memory."""
        last = self._of(grid)
        if last.ranks is None:
            last.ranks = different_ranks(shape, grid)
        return last.ranks

    def held(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array]:
        """The parameters of the ranks of `ranks`, as PipelineRanks.parameters gives them."""
        last = self._of(grid)
        if last.parameters is None:
            last.parameters = self.ranks(shape, grid).parameters(shape, grid)
        return last.parameters

    def once(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The result of the first `compute` under a key. The key must contain everything that the result depends
        on."""
        if key not in self._values:
            self._values[key] = compute()
        return self._values[key]  # type: ignore[no-any-return]

    def rows(self, name: str, run: Run, words: Hashable, columns: Columns, compute: Callable[[Run], Array]) -> Array:
        """The results of `compute` for each plan of a run in arrays, in shape (values, plans).

        They depend on `columns` of its grid, which are integers, on `words` of it, and on the rest of the run.
        `compute` receives plans that differ in columns, and may call `rows` with other names.
        """
        last = self._of(run.grid)
        if columns not in last.distinct:
            grid_columns = columns(run.grid)
            firsts, which = distinct(grid_columns)
            numbers_of_keys = self._keys.setdefault(columns, {})
            combinations = as_bytes([column[firsts] for column in grid_columns])
            keys = np.array(
                [numbers_of_keys.setdefault(combination, len(numbers_of_keys)) for combination in combinations]
            )
            last.distinct[columns] = firsts, keys, keys[which]
        firsts, keys, plan_keys = last.distinct[columns]
        table = self._tables.setdefault((name, words, run.setting), _Table())
        new = table.unknown(keys)
        if len(new):
            table.add(keys[new], compute(replace(run, grid=run.grid.at(firsts[new]))))
            self._last = last
        return table.values[:, table.place[plan_keys]]

    def _of(self, grid: PlanGrid) -> "_Last":
        if self._last.grid is not grid:
            self._last = _Last(grid)
        return self._last


@dataclass
class _Last:
    """The results for the latest plans. `distinct` has the first row of each distinct combination, its key, and the key
    of each plan."""

    grid: PlanGrid
    ranks: PipelineRanks | None = None
    parameters: tuple[Array, Array] | None = None
    distinct: dict[Columns, tuple[Array, Array, Array]] = field(default_factory=dict)


class _Table:
    """Columns of values, and the column of each key; -1 if it has none."""

    def __init__(self) -> None:
        self.place: Array = np.zeros(0, np.int64)
        self.values: Array = np.zeros((0, 0))

    def unknown(self, keys: Array) -> Array:
        """The indices of `keys` whose key has no values."""
        num_new = int(keys.max()) + 1 - len(self.place)
        if num_new > 0:
            self.place = np.concatenate((self.place, np.full(num_new, -1)))
        return np.flatnonzero(self.place[keys] < 0)

    def add(self, keys: Array, values: Array) -> None:
        """Store values, of shape (values, keys), of keys that have none."""
        first = self.values.shape[1]
        self.place[keys] = np.arange(first, first + len(keys))
        self.values = np.concatenate((self.values, values), axis=1) if first else values
