"""The costs of operators whose weights are frozen, and of the adapters beside them (config/adapter.py)."""

from dataclasses import replace

import numpy as np

from shardwright.config.nf4_rows import element_bytes
from shardwright.layers.layer_tensors import HALF
from shardwright.layers.operators import Context, Exchange, MatrixProduct, Operator


def adapted(c: Context, operator: Operator) -> Operator:
    """An operator of a model with adapters: its weights are frozen, so no input is gathered for their gradients. If
    maps of its matrix have adapters, their products are added, and their exchange over tp.

    One product with A makes `rank` numbers a token for each map, and a product with B each map's outputs. Beside a
    column-parallel matrix the first is the same on all ranks of tp, or of a rank's own tokens and gathered if the
    sequence is sharded: so its gradient is summed, or scattered. Beside a row-parallel matrix it is a part of the sum
    that the matrix's own result joins.
    """
    if not c.shape.is_adapted:
        return operator
    if operator.name in ("attention enter", "mlp enter", "shared enter"):
        return replace(operator, backward=tuple(e for e in operator.backward if e.kind != "all_gather"))
    products, adapter = operator.layer_operator.products, c.shape.adapter
    is_in_nf4 = adapter.row_format and products and adapter.maps(products[0].matrix)
    stored_bytes = element_bytes(adapter.row_format == "nf4-double") if is_in_nf4 else 0.0
    frozen = tuple(replace(p, is_frozen=p.weight, nf4_bytes=p.weight * stored_bytes) for p in operator.products)
    operator = replace(operator, products=frozen)
    if not products or not (targets := c.shape.adapter.targets_of(products[0].matrix)):
        return operator
    matrix, rank, grid = products[0].matrix, c.shape.adapter.rank, c.grid
    width, is_sharded = rank * len(targets), np.asarray(grid.sequence_parallel)
    if matrix.experts:  # each expert has its own, for its rows, and no exchange
        of_rows, columns = operator.products[0], c.shape.adapter.columns(matrix, grid.expert_tp)
        factors = (replace(of_rows, columns=width), replace(of_rows, inner=rank, columns=columns))
        trained = tuple(replace(factor, is_frozen=False, nf4_bytes=0.0) for factor in factors)
        return replace(operator, products=(*operator.products, *trained))
    rows = c.tokens if matrix.is_row_parallel else c.tokens / np.where(is_sharded, grid.tp, 1)
    columns = c.shape.adapter.columns(matrix, grid.tp)
    factors = (MatrixProduct(rows, matrix.inner_on(grid.tp), width), MatrixProduct(c.tokens, rank, columns))
    operator = replace(operator, products=(*operator.products, *factors))
    if matrix.is_row_parallel:
        return operator
    size = HALF * c.tokens * width * (grid.tp > 1)
    gather, scatter = (Exchange(kind, "tp", size * is_sharded) for kind in ("all_gather", "reduce_scatter"))
    summed = Exchange("all_reduce", "tp", size * (1 - is_sharded))
    return replace(operator, forward=(*operator.forward, gather), backward=(*operator.backward, summed, scatter))
