"""What a layer of a plan costs is computed once for all plans that have the same layer.

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


# From which numbers and words of a plan follows what its layers cost: what a memo tells plans apart by.


def layer_words(cut: PlanGrid) -> tuple[Any, ...]:
    """What of a plan beside its numbers says what a layer computes, sends and keeps, but for what it recomputes."""
    return cut.precision, cut.cp_method, cut.dispatch


def plain_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The whole numbers from which follows what a piece without experts computes, sends and keeps. `cut` is of
    arrays."""
    flags = (cut.sequence_parallel, cut.offload_activations)
    return cut.tp, cut.cp, cut.microbatch, cut.world, *(flag.astype(np.int64) for flag in flags), *_order_columns(cut)


def _order_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The numbers that say where those lie who exchange something in every layer, where others may lie between them."""
    if all(ORDERS[number].keeps_layers_near for number, _ in cut.orders):
        return ()
    return cut.order_number, cut.dp, cut.pp, cut.block


def layer_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that determine what a layer of any kind costs."""
    return *plain_columns(cut), cut.ep, cut.expert_tp


def shard_words(cut: PlanGrid) -> tuple[Any, ...]:
    """What beside its numbers says how the parameters of a layer come together under ZeRO-3."""
    return cut.precision, cut.reduce_bytes


def shard_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The numbers that determine how the parameters of a layer come together under ZeRO-3. `cut` is of arrays."""
    is_sharded, has_orders = cut.zero == 3, any(number for number, _ in cut.orders)
    return (
        cut.tp, cut.ep, cut.expert_tp, is_sharded * cut.cp, is_sharded * cut.dp, is_sharded * (1 + cut.zero_ranks),
        cut.offload_parameters.astype(np.int64), is_sharded * cut.num_copies,
        *((is_sharded * cut.order_number, is_sharded * (cut.order_number > 0) * cut.pp) if has_orders else ()),
    )  # fmt: skip


class Memo:
    """Tables of what was computed. It is for one job and one set of constants, and only grows."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}
        self._values: dict[Hashable, Any] = {}
        self._keys: dict[Columns, dict[tuple[int, ...], int]] = {}
        self._last = _Last(PlanGrid())

    def ranks(self, shape: ModelShape, cut: PlanGrid) -> PipelineRanks:
        """`different_ranks` of these plans; once for a step's time and for its memory."""
        last = self._of(cut)
        if last.ranks is None:
            last.ranks = different_ranks(shape, cut)
        return last.ranks

    def held(self, shape: ModelShape, cut: PlanGrid) -> tuple[Array, Array]:
        """The parameters of these ranks."""
        last = self._of(cut)
        if last.held is None:
            last.held = self.ranks(shape, cut).parameters(shape, cut)
        return last.held

    def once(self, key: Hashable, of: Callable[[], Value]) -> Value:
        """What `of` said when it was first asked under a key, which must say all that it follows from."""
        if key not in self._values:
            self._values[key] = of()
        return self._values[key]  # type: ignore[no-any-return]

    def rows(self, name: str, run: Run, words: Hashable, columns: Columns, of: Callable[[Run], Array]) -> Array:
        """What `of` says of each plan of a run in arrays, in shape (values, plans).

        It follows from `columns` of its cut, which are whole numbers, from `words` of it, and from all else in the run;
        `of` is asked for plans that differ in columns, and may ask for rows of other names itself.
        """
        last = self._of(run.cut)
        if columns not in last.distinct:
            of_each = columns(run.cut)
            found, which = distinct(of_each)
            known = self._keys.setdefault(columns, {})
            numbers = zip(*(column[found].tolist() for column in of_each), strict=True)
            keys = np.array([known.setdefault(of_one, len(known)) for of_one in numbers])
            last.distinct[columns] = found, keys, keys[which]
        found, keys, of_plans = last.distinct[columns]
        table = self._tables.setdefault((name, words, run.setting), _Table())
        new = table.unknown(keys)
        if len(new):
            table.add(keys[new], of(replace(run, cut=run.cut.at(found[new]))))
            self._last = last
        return table.values[:, table.place[of_plans]]

    def _of(self, cut: PlanGrid) -> "_Last":
        if self._last.cut is not cut:
            self._last = _Last(cut)
        return self._last


@dataclass
class _Last:
    """What follows from the numbers of the plans that were asked for last: a row of each distinct combination, its
    key, and that of each plan."""

    cut: PlanGrid
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
