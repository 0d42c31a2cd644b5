"""The pieces of a model as a pipeline rank on a cluster's device sees them: seconds and bytes, by the cost model.

Seconds are those of cost/stage_time.py. Bytes are asked of cost/memory.py: a model of few layers is laid over two
pipeline ranks, and what a layer more takes is the difference.
"""

from dataclasses import replace

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import Constants, device_of
from shardwright.cost.memory import Memory, memory_lost, rank_memory
from shardwright.cost.pipeline_bubble import in_flight
from shardwright.cost.stage_time import Costing, PieceTime
from shardwright.planner.stages.pieces import Piece, PipelineSlot
from shardwright.workload.memo import Memo
from shardwright.workload.query import Run
from shardwright.workload.stage_contents import LayerKind, layer_kinds

_ALL_LAYERS = 2**30  # more than any model has


def seats(run: Run, plan: PlanSpec, constants: Constants, memo: Memo | None = None) -> list[PipelineSlot]:
    """The seat of each pipeline rank, were all of them on the run's device.

    `memo` has what was computed before of the same model and cluster. KeyError says what is not known.
    """
    memo = memo or Memo()
    kinds = layer_kinds(run.shape, run.grid)
    costing = Costing.of(replace(run, grid=run.grid.as_arrays()), constants)
    lost = memory_lost(run, constants)
    room = device_of(run.device).offered_bytes
    # Beside the head are blocks of further tokens, if any, like the last layer.
    embedded, headed = _probe(run, kinds[-1], (0, 1), constants, memo)
    of_kind = {}
    for kind in dict.fromkeys(kinds):
        one, two = (_probe(run, kind, layout, constants, memo)[1] for layout in ((0, 1), (0, 2)))
        kept = (1 + lost) * (two.activations - one.activations)
        of_kind[kind] = _piece(costing.piece(*kind), kept, _state(two) - _state(one))
    layer, end = of_kind[kinds[-1]], costing.piece("head")
    if mtp := run.shape.mtp:
        end += (costing.piece("mtp") + costing.piece(*kinds[-1])).times(mtp)
    embedding = _piece(costing.piece("embedding"), 0.0, _state(embedded))
    # What a stage keeps beside its layers is in what the stage without layers keeps.
    beside = embedded.activations
    of_head = (1 + lost) * (headed.activations - beside) - layer.kept_bytes
    head = _piece(end, 0.0, _state(headed) - layer.held_bytes + of_head)
    pieces = (embedding, *(of_kind[kind] for kind in kinds), head)
    # What a rank works with hardly depends on how many layers it holds: what it is with an even layout is set aside.
    evenly = rank_memory(replace(run, grid=replace(run.grid, layout=())), constants, memo)
    slots, m, v = [], run.grid.num_microbatches, plan.stages_per_rank
    for rank in range(plan.pp):
        alive = float(in_flight(plan.schedule, plan.pp, rank, m, v, extra_warmup=plan.extra_warmup))
        even = evenly[rank]
        context = even.overhead - lost * (even.activations + even.working + even.buffers)
        aside = context + (1 + lost) * (even.working + even.buffers + alive * beside)
        slots.append(PipelineSlot(pieces, room - aside, alive))
    return slots


def _probe(run: Run, kind: LayerKind, layout: tuple[int, int], constants: Constants, memo: Memo) -> list[Memory]:
    """The needs of two pipeline ranks that hold the embedding, so many layers of a kind, and the head."""
    shape = run.shape.of_kind(kind[0], layers=sum(layout))
    if shape.experts:
        dense_layers = 0 if has_experts(kind[0]) else _ALL_LAYERS
        shape = replace(shape, experts=replace(shape.experts, dense_layers=dense_layers, every=1))
    # One microbatch, so that one is in flight.
    grid = replace(
        run.grid, pp=2, virtual=1, schedule="1f1b", is_vee=False, layout=layout, recompute=kind[1], policies=(),
        global_batch=run.grid.dp * run.grid.microbatch,
    )  # fmt: skip
    return rank_memory(replace(run, shape=shape, grid=grid), constants, memo)


def _state(memory: Memory) -> float:
    return float(memory.parameters + memory.gradients + memory.optimizer)


def _piece(time: PieceTime, kept_bytes: float, held_bytes: float) -> Piece:
    total, forward = (float(np.ravel(seconds)[0]) for seconds in (time.total, time.forward + time.exposed_forward))
    return Piece(forward, total - forward, float(kept_bytes), float(held_bytes))
