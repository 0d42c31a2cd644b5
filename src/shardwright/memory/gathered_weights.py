"""Bytes of the weights that ranks of ZeRO-3 gather to compute, and of gradients on their way to their owners.

Software that fetches weights ahead holds two layers of them, with the tables, and a layer's gradients wait for its
collective. A compiled loop of layers (XLA: GSPMD, arXiv 2105.04663) gathers in its body what the body uses, and each
gradient is reduced where it is made; a table is gathered outside the loop, when no layer is.
"""

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_tensors import FLOAT32
from shardwright.layers.query import PlanGrid, Run
from shardwright.sharding.groups import num_replicas


def keeps_whole(grid: PlanGrid, software: SoftwareSpec) -> Numbers:
    """True where ranks of ZeRO-3 keep whole parameters and gradients through a step, by `whole_in_pipeline`."""
    return (grid.zero == 3) & (np.asarray(grid.pp) > 1) & software.zero.whole_in_pipeline


def gathered_bytes(
    run: Run, software: SoftwareSpec, num_elements: Numbers, num_layers: Numbers
) -> tuple[Numbers, Numbers]:
    """Bytes (beside the backward of a layer, beside the loss) that one rank holds: gathered weights and gradients of
    ZeRO-3, or the buffers in which gradients wait under any stage.

    `num_elements`: parameters of the rank's layers and tables; `num_layers`: its layers, at least 1.
    """
    grid, facts, is_loop = run.grid, software.zero, software.gathered_layers == 1
    table = run.shape.table_elements / grid.tp
    tables = run.shape.num_tables * table
    layer = np.maximum(0.0, num_elements - tables) / num_layers
    shared = facts.buffered[0] * software.reduce_bytes * (grid.zero > 0)
    in_layer: Numbers = layer if is_loop else software.gathered_layers * layer + tables
    at_loss: Numbers = table if is_loop else in_layer
    if facts.gathered:
        at_most = np.maximum(facts.gathered, _largest_weight(run))  # one that is larger is gathered by itself
        in_layer = at_loss = np.minimum(num_elements, at_most)
    waiting = (_largest_weight(run), table) if is_loop else (layer, layer)
    if facts.buffered[1]:
        waiting = (np.maximum(facts.buffered[1], _largest_weight(run)),) * 2
    in_turn = 1 - keeps_whole(grid, software)
    in_layer, at_loss = in_layer * in_turn, at_loss * in_turn
    held = (
        np.where(grid.zero == 3, _in_bytes(run, software, weights) + gradients * software.scattered_bytes, shared)
        for weights, gradients in zip((in_layer, at_loss), waiting, strict=True)
    )
    beside_layer, beside_loss = (num_bytes * (num_replicas(grid) > 1) for num_bytes in held)
    return beside_layer, beside_loss


def _in_bytes(run: Run, software: SoftwareSpec, weights: Numbers) -> Numbers:
    """Bytes of gathered weights, of which those of tables are never in fp8."""
    grid = run.grid
    if software.zero.gathers_wide:
        return FLOAT32 * weights
    of_tables = np.minimum(weights, run.shape.num_tables * run.shape.table_elements / grid.tp)
    return grid.gathered_bytes(software.float8_gather) * (weights - of_tables) + grid.element_bytes * of_tables


def _largest_weight(run: Run) -> Numbers:
    """Elements of the largest weight of a layer on a rank; maps that are side by side count one by one."""
    shape, grid = run.shape, run.grid
    largest: Numbers = 0.0
    for matrix in {matrix for kind in shape.kinds for matrix in shape.matrices(kind)}:
        ranks: Numbers = grid.ep * grid.expert_tp if matrix.experts else grid.tp
        ranks = ranks if matrix.sharded_dim is not None else 1
        largest = np.maximum(largest, matrix.num_elements / max(1, len(matrix.widths)) / ranks)
    return largest
