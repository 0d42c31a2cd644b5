"""The pieces of a model on a cluster's device: seconds and bytes of each, by the cost model.

Seconds are those of cost/stage_time.py. Bytes come from memory/rank_estimate.py: a model of few layers is placed on two
pipeline ranks, and the difference that one more layer makes is the memory of a layer.
"""

from dataclasses import replace

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import Constants, device_of
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.pipeline_bubble import in_flight
from shardwright.layers.memo import Memo
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import LayerKind, layer_kinds
from shardwright.memory.rank_estimate import Memory, memory_lost, rank_memory
from shardwright.planner.stages.pieces import Piece, PipelineSlot
from shardwright.simulate.closed_form import piece_times

_ALL_LAYERS = 2**30  # more than any model has


def timed_pieces(run: Run, constants: Constants, memo: Memo) -> tuple[Piece, ...]:
    """The embedding, the layers and the head of a run with their seconds, and without bytes.

    `memo` keeps earlier results of the same model and cluster. KeyError names what is unknown.
    """
    times = piece_times(run, constants, memo)
    kinds, end = layer_kinds(run.shape, run.grid), times["head", "none"]
    if mtp := run.shape.mtp:
        end += (times["mtp", "none"] + times[kinds[-1]]).times(mtp)
    piece_of_kind = {kind: _piece(times[kind]) for kind in dict.fromkeys(kinds)}
    return _piece(times["embedding", "none"]), *(piece_of_kind[kind] for kind in kinds), _piece(end)


def pipeline_slots(
    run: Run, plan: PlanSpec, constants: Constants, memo: Memo | None = None, *, room: float | None = None
) -> list[PipelineSlot]:
    """The slot of each pipeline rank, in `room` bytes of the run's device; None is all of its room.

    `memo` keeps earlier results of the same model and cluster. KeyError names what is unknown.
    """
    memo = memo or Memo()
    kinds = layer_kinds(run.shape, run.grid)
    lost = memory_lost(run, constants)
    room = device_of(run.device).offered_bytes if room is None else room
    probes = {kind: _probe(run, kind, (0, 1), constants, memo) for kind in dict.fromkeys(kinds)}
    bytes_of_kind = {}  # (kept, held) of a layer
    for kind, (_, one_layer) in probes.items():
        _, two_layers = _probe(run, kind, (0, 2), constants, memo)
        kept_bytes = (1 + lost) * (two_layers.activations - one_layer.activations)
        bytes_of_kind[kind] = float(kept_bytes), _state(two_layers) - _state(one_layer)
    # With the head there are blocks of further tokens, if any, which are like the last layer.
    embedding_rank, head_rank = probes[kinds[-1]]
    # A stage without layers keeps the tensors that any stage keeps besides its layers.
    stage_kept = embedding_rank.activations
    layer_kept, layer_held = bytes_of_kind[kinds[-1]]
    head_kept = (1 + lost) * (head_rank.activations - stage_kept) - layer_kept
    head = 0.0, float(_state(head_rank) - layer_held + head_kept)
    piece_bytes = (0.0, _state(embedding_rank)), *(bytes_of_kind[kind] for kind in kinds), head
    pieces = tuple(
        replace(piece, kept_bytes=kept, held_bytes=held)
        for piece, (kept, held) in zip(timed_pieces(run, constants, memo), piece_bytes, strict=True)
    )
    # Working memory hardly depends on the number of layers of a rank: that of an even layout is reserved.
    even_memories = rank_memory(replace(run, grid=replace(run.grid, layout=())), constants, memo)
    slots, m, v = [], run.grid.num_microbatches, plan.stages_per_rank
    for rank in range(plan.pp):
        alive = float(in_flight(plan.schedule, plan.pp, rank, m, v, extra_warmup=plan.extra_warmup))
        even = even_memories[rank]
        context = even.overhead - lost * (even.activations + even.working + even.buffers)
        reserved = context + (1 + lost) * (even.working + even.buffers + alive * stage_kept)
        slots.append(PipelineSlot(pieces, room - reserved, alive))
    return slots


def _probe(run: Run, kind: LayerKind, layout: tuple[int, int], constants: Constants, memo: Memo) -> list[Memory]:
    """The memory of two pipeline ranks with the embedding, `layout` layers of a kind, and the head."""
    shape = run.shape.of_kind(kind[0], layers=sum(layout))
    if shape.experts:
        dense_layers = 0 if has_experts(kind[0]) else _ALL_LAYERS
        shape = replace(shape, experts=replace(shape.experts, dense_layers=dense_layers, every=1))
    # Only one microbatch, so that one is in flight.
    grid = replace(
        run.grid,
        pp=2,
        virtual=1,
        schedule="1f1b",
        is_vee=False,
        layout=layout,
        recompute=kind[1],
        policies=(),
        global_batch=run.grid.dp * run.grid.microbatch,
    )
    return rank_memory(replace(run, shape=shape, grid=grid), constants, memo)


def _state(memory: Memory) -> float:
    return float(memory.parameters + memory.gradients + memory.optimizer)


def _piece(time: PieceTime) -> Piece:
    total, forward = (float(np.ravel(seconds)[0]) for seconds in (time.total, time.forward + time.exposed_forward))
    return Piece(forward, total - forward)
