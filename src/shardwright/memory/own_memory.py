"""Activations of this runtime, of many plans at once: the account (memory/) in arrays.

The account itself computes, once for each distinct layer, the bytes that the layer keeps, recomputes, leaves for its
weight gradients and needs while it runs. This module multiplies them by the microbatches in flight, for which schedules
have closed forms; own_state.py has the state and ZeRO's buffers. The account replays the rank's own list of
actions instead, which takes thousands of times as long. A test compares the two (tests/memory/test_own_memory.py), and
the account judges the plans of a search before they are shown.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardwright.config.array_math import MixedError
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import KEEP_ALL, WHOLE_LAYER, Policy
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.pipeline_bubble import alive_microbatches, in_flight_split, waiting_losses
from shardwright.layers.arrays import Array, Numbers, distinct
from shardwright.layers.layer_tensors import BLOCK
from shardwright.layers.memo import Memo, layer_words
from shardwright.layers.query import PlanGrid, Run, named_operators
from shardwright.layers.stage_contents import LayerKind, PipelineRanks, layers_by_kind
from shardwright.memory.activations import (
    documents_kept,
    embedding_kept,
    head_kept,
    head_working_bytes,
    layer_of,
)
from shardwright.memory.kept_tensors import Bytes, Share
from shardwright.memory.layer_memory import LayerMemory, further_layers

# Policies of a search, asked for together: to make a layer takes longer than to ask it.
_USUAL = ("none", "attention", "activation+norm", "activation+attention+norm+qkv+up", "full")
_MESSAGES = 3  # of a pipeline, in transfer or waiting


class LayerBytes(NamedTuple):
    """Bytes of a layer of one kind for a microbatch: kept from F to B, recomputed in its turn, left from I to W, and
    needed while it runs. Each may have an entry per plan."""

    kept: Bytes
    recomputed: Bytes
    deferred: Bytes
    working: Bytes


class EndBytes(NamedTuple):
    """Bytes of a microbatch beside its layers: of a stage's input, which is also the size of a message; kept by the
    embedding, by every stage and by the head; needed by the head; and, of all modules of further tokens without their
    blocks, kept, left from I to W, and needed in the turn of the last one."""

    stage_input: Bytes
    embedding: Bytes
    documents: Bytes
    head: Bytes
    head_working: Bytes
    further_kept: Bytes
    further_deferred: Bytes
    further_input: Bytes


class HeldActivations(NamedTuple):
    """Bytes of shape (ranks, plans): activations at the peak, working memory then, inputs on the host, messages."""

    activations: Numbers
    working: Numbers
    offloaded: Numbers
    messages: Numbers


_OF_LAYER, _OF_ENDS = len(LayerBytes._fields), len(EndBytes._fields)


def _all_kinds(run: Run, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The kinds of layers to ask the account for: the same for all plans of a search."""
    policies = dict.fromkeys((*_USUAL, *(_asked(policy) for _, policy in kinds)))
    of_model = dict.fromkeys((*shape_of(_job_of(run).model).kinds, *(kind for kind, _ in kinds)))
    return tuple((kind, policy) for kind in of_model for policy in policies)


def _asked(policy: str) -> str:
    return "none" if policy == "stage" else policy


def account_rows(run: Run, kinds: tuple[LayerKind, ...]) -> Array:
    """The LayerBytes of each kind of layer, and the EndBytes, one below the other: (values, plans)."""
    grid, job = run.grid.as_arrays(), _job_of(run)
    table = np.empty((_OF_LAYER * len(kinds) + _OF_ENDS, len(grid.tp)))
    firsts, part_of_plan = distinct(_asked_together(job, grid))
    parts = [np.flatnonzero(part_of_plan == number) for number in range(len(firsts))]
    while parts:
        plans = parts.pop()
        try:
            rows = _plan_rows(_with_layers(job, grid, plans), kinds)
        except MixedError as mixed:
            parts += plans[mixed.condition], plans[~mixed.condition]
            continue
        for row, values in zip(table, rows, strict=True):
            row[plans] = values
    return table


def _asked_together(job: JobSpec, grid: PlanGrid) -> tuple[Array, ...]:
    """Columns that are equal for plans that the account may take together, because they share the same axes. If the
    capacity of experts is rounded, only equal plans are."""
    if job.model.moe.experts and job.model.moe.capacity(1) is not None:
        return _layer_columns(grid)
    columns = [grid.sequence_parallel, grid.tp > 1, grid.cp > 1, grid.ep > 1, grid.expert_tp == grid.tp]
    return tuple(column.astype(np.int64) for column in columns)


def _layer_columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that `_with_layers` reads: places of ranks and of kept inputs change no layer's bytes."""
    return grid.sequence_parallel.astype(np.int64), grid.tp, grid.cp, grid.ep, grid.expert_tp, grid.microbatch


def _job_of(run: Run) -> JobSpec:
    assert run.job is not None, "a run of this runtime is of a job"
    return run.job


def _with_layers(job: JobSpec, grid: PlanGrid, plans: Array) -> JobSpec:
    """A job with the layers of some plans: numbers that differ are arrays. Does not validate them."""
    names = {name: name for name in ("tp", "cp", "ep", "expert_tp")} | {"microbatch_size": "microbatch"}
    numbers = {field: getattr(grid, name)[plans] for field, name in names.items()}
    plan = {name: int(column[0]) if np.all(column == column[0]) else column for name, column in numbers.items()} | {
        "sequence_parallel": bool(grid.sequence_parallel[plans[0]]),
        "cp_method": grid.cp_method,
        "dispatch": grid.dispatch,
    }
    return job.model_copy(update={"plan": job.plan.model_copy(update=plan)})


def _plan_rows(job: JobSpec, kinds: tuple[LayerKind, ...]) -> list[Bytes]:
    shape = shape_of(job.model)
    numbers = {shape.kind(number): number for number in range(job.model.layers)}
    layers = {kind: layer_of(job, number) for kind, number in numbers.items()}
    rows: list[Bytes] = []
    for kind, policy in kinds:
        layer = layers.get(kind)
        memory = LayerMemory.of(layer, policy_of(policy), works=True) if layer else _NO_LAYER
        rows += LayerBytes(memory.kept_bytes, memory.again_bytes, memory.deferred_bytes, working=memory.working_bytes)
    return [*rows, *_ends(job)]


def _ends(job: JobSpec) -> EndBytes:
    modules = list(further_layers(job, KEEP_ALL, works=False)) if job.model.mtp_layers else []
    block = LayerMemory.of(layer_of(job, job.model.layers), KEEP_ALL) if modules else _NO_LAYER
    stage_input = Share.of(job)[BLOCK.input]
    return EndBytes(
        stage_input,
        sum(embedding_kept(job).values()),
        sum(documents_kept(job).values()),
        sum(head_kept(job).values()),
        head_working=head_working_bytes(job),
        further_kept=sum(module.kept_bytes - block.kept_bytes for module in modules),
        further_deferred=sum(module.deferred_bytes - block.deferred_bytes for module in modules),
        further_input=len(modules) * stage_input,
    )


_NO_LAYER = LayerMemory(KEEP_ALL, 0, 0, 0)


def policy_of(name: str) -> Policy:
    """The policy of a value of PlanGrid.recompute (layers/query.py). "stage" recomputes the whole stage at once, and
    then every layer keeps all its tensors until its backward."""
    if name == "stage":
        return KEEP_ALL
    return WHOLE_LAYER if name == "full" else named_operators(name)


def _account(run: Run, kinds: tuple[LayerKind, ...], memo: Memo) -> tuple[list[LayerBytes], EndBytes]:
    """(bytes of each kind of layer, bytes beside them), by plan."""
    all_kinds = _all_kinds(run, kinds)
    words = all_kinds, *layer_words(run.grid)
    rows = memo.rows("account", run, words, _layer_columns, partial(account_rows, kinds=all_kinds))
    firsts = [_OF_LAYER * all_kinds.index((kind, _asked(policy))) for kind, policy in kinds]
    return [LayerBytes(*rows[first : first + _OF_LAYER]) for first in firsts], EndBytes(*rows[-_OF_ENDS:])


@dataclass(frozen=True)
class _Microbatch:
    """Bytes of one microbatch on each rank, of shape (ranks, plans): `kept` of all its stages, of which inputs are
    `offloaded`; `deferred` from I to W; needed `in_turn` of a layer; `recomputed` of a stage at once; and `last`, what
    one layer leaves from I to W."""

    kept: Numbers
    offloaded: Numbers
    deferred: Numbers
    in_turn: Numbers
    recomputed: Numbers
    last: Numbers

    @classmethod
    def of(cls, grid: PlanGrid, ranks: PipelineRanks, layers: list[LayerBytes], ends: EndBytes) -> "_Microbatch":
        """The sums over the layers of each rank, with what its stages keep beside them."""
        num_stages = grid.virtual * grid.num_copies  # of a rank
        kept: Numbers = ranks.embedding * ends.embedding + ends.documents * num_stages + ranks.head * ends.further_kept
        none = 0.0 * kept
        in_turn, offloaded, recomputed, last = none, none, none, none
        deferred = ranks.head * ends.further_deferred + none
        for (_, policy), num_layers, layer in zip(ranks.kinds, ranks.layers, layers, strict=True):
            deferred = deferred + num_layers * layer.deferred
            last = np.maximum(last, layer.deferred * (num_layers > 0))
            in_turn = np.maximum(in_turn, (layer.recomputed + layer.working) * (num_layers > 0))
            if policy == "stage":
                recomputed = recomputed + layer.kept * num_layers / num_stages
                continue
            kept = kept + num_layers * layer.kept
            if policy == "full":  # inputs but the stage's own wait on the host, and two are here in their turn
                offloaded = offloaded + num_layers * layer.kept * grid.offload_activations
                in_turn = in_turn + 2 * layer.kept * grid.offload_activations
        offloaded = np.maximum(0.0, offloaded - ends.stage_input * (num_stages - ranks.embedding))
        if any(policy == "stage" for _, policy in ranks.kinds):
            kept = kept + ends.stage_input * num_stages
            # The last stage is not recomputed. In a pair its microbatch is beside the one that is recomputed.
            recomputed = recomputed * (1 + ranks.head * grid.of_schedules(lambda facts: facts.pairs))
        return cls(kept, offloaded, deferred, in_turn, recomputed=recomputed, last=last)


def held_activations(run: Run, ranks: PipelineRanks, memo: Memo) -> HeldActivations:
    """The bytes of the microbatches in flight on each rank."""
    grid = run.grid
    layers, ends = _account(run, ranks.kinds, memo)
    microbatch, alive = _Microbatch.of(grid, ranks, layers, ends), alive_microbatches(grid, ranks.rank)
    p, m = grid.pp, grid.num_microbatches
    kept, waiting = grid.by_schedule(
        lambda name, at: np.stack(in_flight_split(name, p[at], _on_which_most_wait(name, ranks, p, at), m[at]))
    )
    on_device, of_stage = microbatch.kept - microbatch.offloaded, 1 / (grid.virtual * grid.num_copies)
    # Begin and end of the input gradient with which most wait. In its turn a layer does not wait itself.
    at_begin = on_device * (kept + of_stage) + microbatch.deferred * (waiting - of_stage) + microbatch.recomputed
    at_end = on_device * kept + microbatch.deferred * waiting - np.minimum(microbatch.last, microbatch.in_turn)
    with_most_alive = on_device * alive * _unevenness(run) + microbatch.recomputed
    activations = np.maximum(with_most_alive, (waiting > 0) * np.maximum(at_begin, at_end))
    working = np.maximum(
        microbatch.in_turn - ranks.head * (ends.head - ends.further_input), ranks.head * ends.head_working
    )
    return HeldActivations(
        activations + ranks.head * ends.head * waiting_losses(grid),
        np.maximum(0.0, working),
        microbatch.offloaded * alive,
        _MESSAGES * ends.stage_input * (p > 1),
    )


def least_of_layer(run: Run, memo: Memo) -> tuple[Array, Array]:
    """Bytes of a layer on the device, of the kind that has least: (what a microbatch leaves for the backward, what is
    recomputed and needed beside in its turn). The first is 0 where a stage is recomputed at once. Numbers of the run
    are arrays."""
    kinds, left, needed = tuple(layers_by_kind(run.shape, run.grid)), list[Array](), list[Array]()
    layers, _ = _account(run, kinds, memo)
    for (_, policy), layer in zip(kinds, layers, strict=True):
        left.append(layer.kept * (1 - ((policy == "stage") | (policy == "full") * run.grid.offload_activations)))
        needed.append(layer.recomputed + layer.working)
    return np.min(left, axis=0), np.min(needed, axis=0)


def _unevenness(run: Run) -> Numbers:
    """Layers of the largest stages over those of the mean stage, if microbatches gather in some of a rank's stages."""
    grid, layers = run.grid, run.shape.layers
    stages = grid.pp * grid.virtual
    uneven = -(-layers // stages) * stages / layers
    return np.where(grid.of_schedules(lambda facts: facts.keeps_unevenly), uneven, 1.0)


def _on_which_most_wait(schedule: str, ranks: PipelineRanks, p: Array, at: Any) -> Array:
    """Among pipeline ranks with the same contents, the rank on which most microbatches wait for their weight gradients:
    the last of them, or the middle one for DualPipe."""
    if not ranks.stand_for_others:
        return ranks.rank[:, at]
    rank, is_first, is_last = ranks.rank[:, at], ranks.embedding[:, at] > 0, ranks.head[:, at] > 0
    facts = SCHEDULES[schedule]
    if facts.num_copies > 1:
        return np.where(is_first | is_last, rank, p[at] // 2 - 1)
    last = p[at] - 1 if facts.are_alternating else np.maximum(rank, p[at] - 2)  # the very last has the head
    return np.where(is_first, rank, np.where(is_last, p[at] - 1, last))
