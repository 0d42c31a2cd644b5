"""The distinct layers of a space: many rows of degrees have equal layers, which are bounded once."""

from dataclasses import dataclass

import numpy as np

from shardwright.config.rank_order import ORDERS
from shardwright.layers.arrays import distinct
from shardwright.planner.search.plan_block import Column, Columns, select

_LAYER = ("tp", "cp", "ep", "expert_tp", "microbatch_size", "sequence_parallel")  # layers/memo.py: layer_columns


@dataclass(frozen=True)
class LayerRows:
    """One row of degrees for all rows with equal layers. The rows of a search have its index in a column `layer`."""

    rows: Columns

    @classmethod
    def of(cls, rows: Columns) -> "tuple[LayerRows, Column]":
        """(the distinct layers of some rows, the column `layer` of these)."""
        is_near = all(ORDERS[number].keeps_layers_near for number in np.unique(rows["order"]))
        firsts, layer = distinct([rows[name] for name in (*_LAYER, *(() if is_near else ("order", "dp", "pp")))])
        return cls(select(rows, firsts)), layer

    def __len__(self) -> int:
        return len(self.rows["dp"])

    def used_by(self, rows: Columns) -> tuple[Columns, Column]:
        """(the layers that some rows have, the place of each row's own among them)."""
        is_used = np.zeros(len(self), dtype=bool)
        is_used[rows["layer"]] = True
        return select(self.rows, is_used), (np.cumsum(is_used) - 1)[rows["layer"]]
