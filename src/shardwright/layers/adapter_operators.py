"""The costs of operators whose weights are frozen, and of the adapters beside them (config/adapter.py)."""

from dataclasses import replace

import numpy as np

from shardwright.config.adapter_code import adapter_code
from shardwright.config.nf4_rows import element_bytes
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_operators import piece_operators
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
    if operator.name in _ENTERS:
        kept = operator.kept if c.software.is_own else _kept_inputs(c, operator)
        return replace(operator, backward=tuple(e for e in operator.backward if e.kind != "all_gather"), kept=kept)
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
        trained = tuple(replace(factor, is_frozen=False, nf4_bytes=0.0, is_wide=True) for factor in factors)
        return replace(operator, products=(*operator.products, *trained))
    rows = c.tokens if matrix.is_row_parallel else c.tokens / np.where(is_sharded, grid.tp, 1)
    columns = c.shape.adapter.columns(matrix, grid.tp)
    factors = (
        MatrixProduct(rows, matrix.inner_on(grid.tp), width, is_wide=True),
        MatrixProduct(c.tokens, rank, columns, is_wide=True),
    )
    operator = _with_traffic(c, replace(operator, products=(*operator.products, *factors)), len(targets), columns)
    if matrix.is_row_parallel:
        return operator
    size = HALF * c.tokens * width * (grid.tp > 1)
    gather, scatter = (Exchange(kind, "tp", size * is_sharded) for kind in ("all_gather", "reduce_scatter"))
    summed = Exchange("all_reduce", "tp", size * (1 - is_sharded))
    return replace(operator, forward=(*operator.forward, gather), backward=(*operator.backward, summed, scatter))


# Operators that bring an input to products, and the products.
_ENTERS = {"attention enter": "qkv", "mlp enter": "up", "shared enter": "shared up"}


def _kept_inputs(c: Context, enter: Operator) -> Numbers:
    """Bytes of the input that `enter` brings to frozen products, as adapters of other software keep it: nothing where
    no map has one, once, or a copy for each map that has."""
    matrices = {o.name: o.products[0].matrix for o in piece_operators(c.shape, c.kind) if o.products}
    num_maps = len(c.shape.adapter.targets_of(matrices[_ENTERS[enter.name]]))
    num_copies = num_maps if adapter_code(c.software.adapters).copies else min(1, num_maps)
    return HALF * c.sizes[enter.layer_operator.gives] * num_copies


def _with_traffic(c: Context, operator: Operator, num_maps: int, columns: Numbers) -> Operator:
    """An operator with the traffic of its adapters' elementwise kernels, by elements of inputs and of outputs."""
    code, rows = adapter_code(c.software.adapters), operator.products[0].rows
    num_inputs, num_outputs = num_maps * rows * operator.products[0].inner, rows * columns
    forward, backward = (
        num_inputs * of_input + num_outputs * of_output
        for of_input, of_output in zip(code.of_input, code.of_output, strict=True)
    )
    return operator.with_more_traffic(forward, backward)
