"""Bytes of one microbatch on a pipeline rank: what its layers and its head keep from the forward to the backward, and
the further bytes that the loss or the backward of a layer needs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from shardwright.config.layer_kind import has_experts, is_layer
from shardwright.cost.calibration import software_under
from shardwright.layers.arrays import Array, Numbers, stacked_rows
from shardwright.layers.autocast import cast_bytes
from shardwright.layers.chains import (
    ONE_BY_ONE,
    Chain,
    chains,
    kept_bytes,
    placeholder_elements,
    turn_bytes,
)
from shardwright.layers.embedding_head import logits, loss_bytes
from shardwright.layers.layer_tensors import BLOCK, FLOAT32
from shardwright.layers.memo import Memo, layer_columns, layer_words
from shardwright.layers.operators import Context
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import LayerKind, PipelineRanks
from shardwright.memory.allocator_slack import StreamBlocks, largest_block, stream_blocks


@dataclass(frozen=True)
class KindBytes:
    """Bytes of one layer of a kind, by plan: `kept` under its policy and `all_kept` without one, more than that
    `in_turn` in its backward, its blocks that other streams use `in_forward` and `in_backward`, and its `largest`
    block."""

    kept: Array
    all_kept: Array
    in_turn: Array
    in_forward: Array
    in_backward: Array
    largest: Array


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes of one microbatch by plan: the `loss` needs so many at once, the `head` keeps so many, the `logits` are a
    block in float32, and a layer of each of the `kinds` of the ranks has its own. `placeholders` are those of weight
    gradients on ranks with dense layers, with layers of experts, and with both. `residual` is no number of bytes, but
    of elements, of the residual stream."""

    residual: Array
    loss: Array
    head: Array
    logits: Array
    kinds: tuple[KindBytes, ...]
    placeholders: tuple[Array, ...]

    @classmethod
    def of(cls, run: Run, ranks: PipelineRanks, memo: Memo) -> "MicrobatchBytes":
        """Bytes of one microbatch of each plan of a run in arrays. `memo` keeps earlier results."""
        words = ranks.kinds, *layer_words(run.grid)
        rows = memo.rows("microbatch", run, words, layer_columns, partial(_rows, kinds=ranks.kinds))
        residual, loss, head, logits, *of_kinds = rows[:-_NUM_PLACEHOLDERS]
        num = len(fields(KindBytes))
        return cls(
            residual=residual,
            loss=loss,
            head=head,
            logits=logits,
            kinds=tuple(KindBytes(*of_kinds[num * i : num * (i + 1)]) for i in range(len(ranks.kinds))),
            placeholders=tuple(rows[-_NUM_PLACEHOLDERS:]),
        )


_NUM_PLACEHOLDERS = 3


def _rows(run: Run, kinds: tuple[LayerKind, ...]) -> Array:
    """The numbers of MicrobatchBytes in its order, of shape (values, plans), with the placeholders last."""
    software = software_under(run)
    pieces, context = chains(run.shape, run.grid, software), Context(run.shape, run.grid, software)
    values = [context.sizes[BLOCK.input], loss_bytes(context), _kept_at_end(run, pieces), FLOAT32 * logits(context)]
    for kind, policy in kinds:
        chain, blocks = pieces[kind], stream_blocks(pieces[kind], software)
        kept = kept_bytes(chain, policy)
        if software.splits_inputs and policy == "full":
            kept = np.where(run.grid.sequence_parallel, kept, kept / run.grid.tp)
        casts = cast_bytes(chain, software)
        values += [kept + casts * (policy in ONE_BY_ONE), kept_bytes(chain, "none") + casts, turn_bytes(chain, policy)]
        values += [blocks.forward, blocks.backward, largest_block(chain)]
    # Layers of one kind of MLP have products of the same shapes.
    chain_of_mlp = {has_experts(kind): chain for kind, chain in pieces.items() if is_layer(kind)}
    dense, experts = ([chain_of_mlp[has]] if has in chain_of_mlp else [] for has in (False, True))
    for mlps in (dense, experts, dense + experts):
        values.append(software.placeholder_bytes * placeholder_elements(mlps))
    return stacked_rows(values, len(run.grid.tp))


def _kept_at_end(run: Run, pieces: Mapping[str, Chain]) -> Numbers:
    """Bytes kept by the head, and by the modules that predict further tokens, without their blocks."""
    software = software_under(run)
    kept = kept_bytes(pieces["head"], "none") + cast_bytes(pieces["head"], software)
    return kept + run.shape.mtp * kept_bytes(pieces["mtp"], "none") if run.shape.mtp else kept


@dataclass(frozen=True)
class StageLayers:
    """Bytes of a rank's layers for one microbatch: `kept` from the forward to the backward, with what the stage keeps;
    `offloaded` of these; more than that in the `in_turn` of a layer; the number of layers; and their blocks."""

    kept: Numbers
    offloaded: Numbers
    in_turn: Numbers
    num_layers: Array
    blocks: list[tuple[Array, StreamBlocks]]
    largest: Numbers

    @classmethod
    def of(cls, run: Run, ranks: PipelineRanks, microbatch: MicrobatchBytes) -> "StageLayers":
        """Bytes of the layers of each rank, from those of one layer of each kind."""
        software, grid, residual = software_under(run), run.grid, microbatch.residual
        kept: Numbers = software.stage_kept * residual
        num_stages = grid.virtual * grid.num_copies  # of a rank
        if any(policy == "stage" for _, policy in ranks.kinds):  # the input of each stage
            kept = kept + grid.element_bytes * residual * num_stages
        blocks = []
        zero = np.zeros(len(residual))
        offloaded, working, stage_recomputed, num_layers, largest = zero, zero, zero, zero, zero
        for (_, policy), count, layer in zip(ranks.kinds, ranks.layers, microbatch.kinds, strict=True):
            blocks.append((count, StreamBlocks(layer.in_forward, layer.in_backward)))
            largest = np.maximum(largest, layer.largest * (count > 0))
            in_turn = layer.in_turn * (count > 0)
            if policy not in ONE_BY_ONE:  # a layer or a stage keeps all while it is recomputed
                recomputed = np.where(count > 0, layer.all_kept - layer.kept, 0.0)
                of_stage = recomputed * count / num_stages if policy == "stage" else 0.0
                stage_recomputed = stage_recomputed + of_stage
                in_turn = in_turn + (recomputed if policy != "stage" else 0.0)
            working = np.maximum(working, in_turn)
            kept, num_layers = kept + count * layer.kept, num_layers + count
            if np.any(grid.offload_activations):  # the inputs of two layers are on their way
                offloaded = offloaded + np.maximum(0, count - 2) * layer.kept * grid.offload_activations
        return cls(kept, offloaded, working + stage_recomputed, num_layers, blocks, largest)
