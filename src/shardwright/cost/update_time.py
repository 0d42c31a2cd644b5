"""The time of an update: memory that is read and written by element, and with Muon products and exchanges of matrices.

Sums that Adafactor's ranks make are of a row's and a column's numbers, and are not priced.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Rates
from shardwright.cost.collective_time import all_to_all_s
from shardwright.cost.group_links import Groups
from shardwright.sharding.groups import SHARDS, layout
from shardwright.sharding.matrix_exchange import MATRICES_EACH, orthogonal_flops
from shardwright.sharding.optimizer_state import moments_of
from shardwright.workload.arrays import Array, Numbers
from shardwright.workload.query import PlanGrid, Run
from shardwright.workload.stage_contents import PipelineRanks

_FLOAT = 4  # bytes of a gradient that an update begins with
_NARROW, _OF_NARROW = 2, 9.0  # bytes of an element on its way, for which `other_updates` are, and how often it moves


def update_bytes(software: SoftwareSpec, optimizer: OptimizerSpec, by_matrix: bool, itemsize: int = _NARROW) -> float:
    """Bytes of an update, by element of what is updated `by_matrix` or by itself; `itemsize` of an element of a matrix
    that travels."""
    if optimizer.facts.costs_as_adamw and not by_matrix:
        return software.updated_bytes
    number = len(moments_of(optimizer, by_matrix))
    told = dict(software.other_updates).get(optimizer.name)
    whole = software.update - 8 * (2 - number) if told is None else told
    if optimizer.facts.matrix_update == "orthogonal":
        whole += _OF_NARROW * (itemsize - _NARROW)
    return max(0.0, whole + number * (software.updated_bytes - software.update) / 2)


def _is_like_adamw(optimizer: OptimizerSpec) -> bool:
    """True where the whole update reads and writes what AdamW's does."""
    return optimizer.facts.costs_as_adamw and optimizer.facts.matrix_update == "none"


def elementwise_s(rates: Rates, software: SoftwareSpec, optimizer: OptimizerSpec, updated: "Updated") -> Numbers:
    """Seconds of the update of some elements, with the norm of their gradients."""
    is_measured = software.is_own and _is_like_adamw(optimizer) and software.updated_bytes == software.update
    if is_measured and rates.measured is not None and rates.measured.knows("update", rates.number):
        (seconds,) = rates.measured.seconds("update", rates.number, rates.busy, updated.total)
        return np.where(updated.total > 0, seconds, 0.0)
    return updated.moved_bytes(software, optimizer) / rates.memory


@dataclass(frozen=True)
class Updated:
    """Elements that a rank updates: by matrix, and the others; `itemsize` is bytes of one that travels."""

    by_matrix: Numbers
    others: Numbers
    itemsize: int

    @property
    def total(self) -> Numbers:
        """Every element that the rank updates."""
        return self.by_matrix + self.others

    def moved_bytes(self, software: SoftwareSpec, optimizer: OptimizerSpec) -> Numbers:
        """Bytes that their update reads and writes."""
        return (
            self.by_matrix * update_bytes(software, optimizer, True, self.itemsize)
            + self.others * update_bytes(software, optimizer, False)
        )  # fmt: skip

    def times(self, share: Numbers) -> "Updated":
        """A share of them."""
        return Updated(self.by_matrix * share, self.others * share, self.itemsize)


def held_by_matrix(run: Run, ranks: PipelineRanks, held: tuple[Array, Array]) -> tuple[Numbers, Numbers]:
    """Elements of each rank that are updated by whole matrices, of those that all tokens use and of routed experts'.

    Norms and biases are few, and taken for elements of matrices.
    """
    facts = run.grid.optimizer.facts
    if facts.matrix_update == "none":
        return 0.0 * held[0], 0.0 * held[1]
    tables = run.shape.table_elements / run.grid.tp * ranks.num_tables(run.shape) if facts.layers_alone else 0.0
    return np.maximum(0.0, held[0] - tables), held[1]


def itemsize_of(grid: PlanGrid) -> int:
    """Bytes of an element of a matrix that Muon's ranks exchange, and compute with."""
    return 4 if grid.precision == "float32" else 2


@dataclass(frozen=True)
class _Work:
    """FLOPs of making the matrices of a layer orthogonal: all of them, and the largest; and how many matrices there
    are, and of the largest."""

    total: int = 0
    largest: int = 0
    number: int = 0
    num_largest: int = 0

    @classmethod
    def of(cls, matrices: tuple[Matrix, ...], steps: int) -> "_Work":
        """The work of matrices, of which some are several side by side."""
        flops = [
            orthogonal_flops(rows, matrix.inner, steps)
            for matrix in matrices
            for share in matrix.widths or (1,)
            if (rows := matrix.columns * share // sum(matrix.widths or (1,))) > 1
            for _ in range(max(1, matrix.experts))
        ]
        largest = max(flops, default=0)
        return cls(sum(flops), largest, len(flops), flops.count(largest))


def layer_work(shape: ModelShape, kind: str, steps: int) -> tuple[_Work, _Work]:
    """The work of a layer of a kind: of what all tokens use, and of routed experts."""
    matrices = shape.matrices(kind)
    common = _Work.of(tuple(matrix for matrix in matrices if not matrix.experts), steps)
    return common, _Work.of(tuple(matrix for matrix in matrices if matrix.experts), steps)


def orthogonal_s(run: Run, rates: Rates, groups: Groups, ranks: PipelineRanks, updated: Updated) -> Numbers:
    """Seconds in which Muon makes matrices orthogonal, of the rank that has most to do, and in which they travel to
    their owners and back."""
    grid = run.grid
    if grid.optimizer.facts.matrix_update != "orthogonal":
        return 0.0
    of_kinds = [layer_work(run.shape, kind, grid.optimizer.newton_schulz_steps) for kind, _ in ranks.kinds]
    seconds: Numbers = 0.0
    most: Numbers = 0.0  # exchanges, of what all tokens use or of experts
    for works, shard, num_cut, spread in (
        ([elements[0] for elements in of_kinds], groups.shard, grid.tp, 1),
        ([elements[1] for elements in of_kinds], groups.expert_shard, grid.expert_tp, grid.ep),
    ):
        owners = np.where(grid.zero > 0, shard.size, 1) * num_cut
        total, number, num_largest = (
            sum(layers * getattr(elements, name) for layers, elements in zip(ranks.layers, works, strict=True)) / spread
            for name in ("total", "number", "num_largest")
        )
        exchanges = _exchanges(run, ranks, number, owners)
        # One of the owners has the largest matrices that are left when all others have as many, of each exchange.
        most_of_largest = np.ceil(num_largest / np.maximum(1.0, exchanges) / owners) * exchanges
        flops = np.maximum(total / owners, max(work.largest for work in works) * most_of_largest)
        seconds = seconds + np.where(owners > 1, flops, total) / rates.flops
        most = np.maximum(most, exchanges)
    size = updated.itemsize * updated.by_matrix / np.maximum(1.0, most)
    for group, is_there in ((groups.shard, (grid.zero > 0) & (groups.shard.size > 1)), (groups.tp, grid.tp > 1)):
        seconds = seconds + 2 * most * np.where(is_there, all_to_all_s(rates, group, size), 0.0)
    return seconds


def scratch_bytes(run: Run, ranks: PipelineRanks) -> Numbers:
    """Bytes that Muon borrows for units that it updates together: rows on their way, a matrix that is made orthogonal,
    and gradients in float32 where they are in other numbers."""
    grid, shape = run.grid, run.shape
    if grid.optimizer.facts.matrix_update != "orthogonal":
        return 0.0
    kind = ranks.kinds[-1][0]
    matrices, layers = shape.matrices(kind), np.maximum(1, sum(ranks.layers))
    largest = max(matrix.num_elements // max(1, matrix.experts) // len(matrix.widths or (1,)) for matrix in matrices)
    shards = np.where(grid.zero > 0, layout(grid, SHARDS[False]).size, 1)
    common, experts = layer_work(shape, kind, 1)
    number = layers * (common.number + experts.number / grid.ep)
    rows = _layer_elements(run, ranks) * layers / _exchanges(run, ranks, number, shards * grid.tp) / shards
    ways = 1 + 1.0 * (shards > 1) + 2.0 * (grid.tp > 1)
    of_gradients = _FLOAT * (grid.gradient_bytes not in (0, _FLOAT))
    return itemsize_of(grid) * (ways * rows + 4 * largest) + of_gradients * rows


def _exchanges(run: Run, ranks: PipelineRanks, number: Numbers, owners: Numbers) -> Numbers:
    """How many exchanges a rank's `number` of matrices are updated in, each of whole units; 0 if it has none."""
    units = np.maximum(1.0, np.ceil(_units_by_layer(run, ranks) * sum(ranks.layers)))
    return np.where(number > 0, np.clip(np.round(number / (MATRICES_EACH * owners)), 1.0, units), 0.0)


def _layer_elements(run: Run, ranks: PipelineRanks) -> Numbers:
    """Elements of the matrices of a layer on each rank."""
    grid, matrices = run.grid, run.shape.matrices(ranks.kinds[-1][0])
    routed = sum(matrix.num_elements for matrix in matrices if matrix.experts)
    common = sum(matrix.num_elements for matrix in matrices) - routed
    return common / grid.tp + routed / (grid.ep * grid.expert_tp)


def _units_by_layer(run: Run, ranks: PipelineRanks) -> Numbers:
    """Units that a layer's matrices are updated in: one with ZeRO-3, else as many as buckets; less than one where
    several layers are in a bucket."""
    grid, elements = run.grid, _layer_elements(run, ranks)
    filled = np.minimum(1.0, grid.element_bytes * elements / grid.bucket_bytes) if grid.bucket_bytes else 0.0 * elements
    return np.where(grid.zero == 3, 1.0, filled)
