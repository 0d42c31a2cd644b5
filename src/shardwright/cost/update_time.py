"""The time of an update: memory traffic of each element, and with Muon products and exchanges of matrices.

Adafactor's ranks sum only one number a row and a column; these sums are not priced.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.software import SoftwareSpec
from shardwright.config.units import FLOAT32_BYTES
from shardwright.cost.calibration import Rates
from shardwright.cost.collective_time import all_to_all_s
from shardwright.cost.group_links import Groups
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import PipelineRanks
from shardwright.sharding.groups import SHARDS, layout
from shardwright.sharding.matrix_exchange import MATRICES_EACH, orthogonal_flops
from shardwright.sharding.optimizer_state import moments_of

# Bytes of an exchanged element that `other_updates` assume, and how often an element moves.
_NARROW, _OF_NARROW = 2, 9.0


def update_bytes(software: SoftwareSpec, optimizer: OptimizerSpec, by_matrix: bool, itemsize: int = _NARROW) -> float:
    """Bytes that an update moves for each element, which is updated `by_matrix` or by itself. `itemsize`: bytes of an
    element of an exchanged matrix."""
    if optimizer.facts.costs_as_adamw and not by_matrix:
        return software.updated_bytes
    num_moments = len(moments_of(optimizer, by_matrix))
    stated_bytes = dict(software.other_updates).get(optimizer.name)
    base_bytes = software.update - 8 * (2 - num_moments) if stated_bytes is None else stated_bytes
    if optimizer.facts.matrix_update == "orthogonal":
        base_bytes += _OF_NARROW * (itemsize - _NARROW)
    return max(0.0, base_bytes + num_moments * (software.updated_bytes - software.update) / 2)


def _is_like_adamw(optimizer: OptimizerSpec) -> bool:
    """True if the update of every element reads and writes as much as AdamW's."""
    return optimizer.facts.costs_as_adamw and optimizer.facts.matrix_update == "none"


def elementwise_s(rates: Rates, software: SoftwareSpec, optimizer: OptimizerSpec, updated: "Updated") -> Numbers:
    """Seconds of the update of some elements, with the norm of their gradients."""
    is_measured = software.is_own and _is_like_adamw(optimizer) and software.updated_bytes == software.update
    if is_measured and rates.measured is not None and rates.measured.knows("update", rates.number):
        (seconds,) = rates.measured.seconds("update", rates.number, rates.busy, updated.total)
        return np.where(updated.total > 0, seconds, 0.0)
    return updated.moved_bytes(software, optimizer) / rates.memory_bytes_per_s


@dataclass(frozen=True)
class Updated:
    """Elements that a rank updates: by matrix, and the others. `itemsize`: bytes of an exchanged element."""

    by_matrix: Numbers
    others: Numbers
    itemsize: int

    @property
    def total(self) -> Numbers:
        """Every element that the rank updates."""
        return self.by_matrix + self.others

    def moved_bytes(self, software: SoftwareSpec, optimizer: OptimizerSpec) -> Numbers:
        """Bytes that the update reads and writes."""
        return self.by_matrix * update_bytes(software, optimizer, True, self.itemsize) + self.others * update_bytes(
            software, optimizer, False
        )

    def times(self, share: Numbers) -> "Updated":
        """A share of the elements."""
        return Updated(self.by_matrix * share, self.others * share, self.itemsize)


def held_by_matrix(run: Run, ranks: PipelineRanks, num_elements: tuple[Array, Array]) -> tuple[Numbers, Numbers]:
    """Elements of each rank that are updated by whole matrices: (common, of routed experts). `num_elements` has all
    elements of both.

    Norms and biases are few, and count as elements of matrices.
    """
    facts = run.grid.optimizer.facts
    if facts.matrix_update == "none":
        return 0.0 * num_elements[0], 0.0 * num_elements[1]
    tables = run.shape.table_elements / run.grid.tp * ranks.num_tables(run.shape) if facts.layers_alone else 0.0
    return np.maximum(0.0, num_elements[0] - tables), num_elements[1]


@dataclass(frozen=True)
class _Work:
    """FLOPs to make the matrices of a layer orthogonal, in `total` and of the `largest`; the number of matrices, and of
    those as large as the largest."""

    total: int = 0
    largest: int = 0
    num_matrices: int = 0
    num_largest: int = 0

    @classmethod
    def of(cls, matrices: tuple[Matrix, ...], steps: int) -> "_Work":
        """The work of matrices. Some are several matrices side by side (`widths`)."""
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
    """The work of a layer of a kind: (common matrices, matrices of routed experts)."""
    matrices = shape.matrices(kind)
    common = _Work.of(tuple(matrix for matrix in matrices if not matrix.experts), steps)
    return common, _Work.of(tuple(matrix for matrix in matrices if matrix.experts), steps)


def orthogonal_s(run: Run, rates: Rates, groups: Groups, ranks: PipelineRanks, updated: Updated) -> Numbers:
    """Seconds in which Muon makes matrices orthogonal, of the rank with most work, and sends them to their owners and
    back."""
    grid = run.grid
    if grid.optimizer.facts.matrix_update != "orthogonal":
        return 0.0
    kind_works = [layer_work(run.shape, kind, grid.optimizer.newton_schulz_steps) for kind, _ in ranks.kinds]
    seconds: Numbers = 0.0
    num_exchanges: Numbers = 0.0  # the larger number, of common or of experts' matrices
    for works, shard, tp_size, spread in (
        ([common for common, _ in kind_works], groups.shard, grid.tp, 1),
        ([experts for _, experts in kind_works], groups.expert_shard, grid.expert_tp, grid.ep),
    ):
        owners = np.where(grid.zero > 0, shard.size, 1) * tp_size
        total, num_matrices, num_largest = (
            sum(layers * getattr(work, name) for layers, work in zip(ranks.layers, works, strict=True)) / spread
            for name in ("total", "num_matrices", "num_largest")
        )
        exchanges = _exchanges(run, ranks, num_matrices, owners)
        # In each exchange some owner has the most of the largest matrices: their number over the owners, rounded up.
        most_of_largest = np.ceil(num_largest / np.maximum(1.0, exchanges) / owners) * exchanges
        flops = np.maximum(total / owners, max(work.largest for work in works) * most_of_largest)
        seconds = seconds + np.where(owners > 1, flops, total) / rates.flops
        num_exchanges = np.maximum(num_exchanges, exchanges)
    size = updated.itemsize * updated.by_matrix / np.maximum(1.0, num_exchanges)
    for group, is_there in ((groups.shard, (grid.zero > 0) & (groups.shard.size > 1)), (groups.tp, grid.tp > 1)):
        seconds = seconds + 2 * num_exchanges * np.where(is_there, all_to_all_s(rates, group, size), 0.0)
    return seconds


def scratch_bytes(run: Run, ranks: PipelineRanks) -> Numbers:
    """Bytes that Muon borrows for units that it updates together: exchanged rows, a matrix that is made orthogonal, and
    gradients in float32 if they have another type."""
    grid, shape = run.grid, run.shape
    if grid.optimizer.facts.matrix_update != "orthogonal":
        return 0.0
    kind = ranks.kinds[-1][0]
    matrices, layers = shape.matrices(kind), np.maximum(1, sum(ranks.layers))
    largest = max(matrix.num_elements // max(1, matrix.experts) // len(matrix.widths or (1,)) for matrix in matrices)
    shards = np.where(grid.zero > 0, layout(grid, SHARDS[False]).size, 1)
    common, experts = layer_work(shape, kind, 1)
    num_matrices = layers * (common.num_matrices + experts.num_matrices / grid.ep)
    rows = _layer_elements(run, ranks) * layers / _exchanges(run, ranks, num_matrices, shards * grid.tp) / shards
    ways = 1 + 1.0 * (shards > 1) + 2.0 * (grid.tp > 1)
    gradient_bytes = FLOAT32_BYTES * (grid.gradient_bytes not in (0, FLOAT32_BYTES))
    return grid.element_bytes * (ways * rows + 4 * largest) + gradient_bytes * rows


def _exchanges(run: Run, ranks: PipelineRanks, num_matrices: Numbers, owners: Numbers) -> Numbers:
    """The number of exchanges in which a rank updates its matrices, each of whole units; 0 if it has no matrices."""
    units = np.maximum(1.0, np.ceil(_units_by_layer(run, ranks) * sum(ranks.layers)))
    return np.where(num_matrices > 0, np.clip(np.round(num_matrices / (MATRICES_EACH * owners)), 1.0, units), 0.0)


def _layer_elements(run: Run, ranks: PipelineRanks) -> Numbers:
    """Elements of the matrices of a layer on each rank."""
    grid, matrices = run.grid, run.shape.matrices(ranks.kinds[-1][0])
    routed = sum(matrix.num_elements for matrix in matrices if matrix.experts)
    common = sum(matrix.num_elements for matrix in matrices) - routed
    return common / grid.tp + routed / (grid.ep * grid.expert_tp)


def _units_by_layer(run: Run, ranks: PipelineRanks) -> Numbers:
    """Units in which a layer's matrices are updated: one with ZeRO-3, else the number of buckets, which is less than
    one if a bucket has several layers."""
    grid, elements = run.grid, _layer_elements(run, ranks)
    share = np.minimum(1.0, grid.element_bytes * elements / grid.bucket_bytes) if grid.bucket_bytes else 0.0 * elements
    return np.where(grid.zero == 3, 1.0, share)
