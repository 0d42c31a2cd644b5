"""The bytes of the frozen matrices beside adapters: of elements of the computation's number type, or of rows in NF4."""

from typing import Any

from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.config.nf4_rows import row_bytes
from shardwright.layers.query import PlanGrid


def base_bytes(shape: ModelShape, kind: str, grid: PlanGrid) -> tuple[Any, Any]:
    """Bytes of the matrices of a layer of a kind on each rank: (those that all tokens use, those of its routed
    experts)."""
    common: Any = 0.0
    routed: Any = 0.0
    for matrix in shape.matrices(kind):
        if matrix.experts:
            routed = routed + matrix.experts / grid.ep * _stored(shape, matrix, grid.element_bytes, grid.expert_tp)
        else:
            common = common + _stored(shape, matrix, grid.element_bytes, grid.tp)
    return common, routed


def _stored(shape: ModelShape, matrix: Matrix, element_bytes: Any, tp: Any) -> Any:
    """Bytes of one matrix on each of `tp` ranks. A matrix without maps that have names, such as a router's, is never
    in NF4."""
    adapter = shape.adapter
    if not adapter.row_format or not adapter.maps(matrix):
        return element_bytes * matrix.columns_on(tp) * matrix.inner_on(tp)
    is_double = adapter.row_format == "nf4-double"
    return matrix.columns_on(tp) * row_bytes(matrix.inner_on(tp), matrix.inner, is_double)
