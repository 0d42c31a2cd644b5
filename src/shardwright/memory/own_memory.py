"""Memory of this runtime, of many plans at once: the account (memory/) in arrays.

The account itself computes, once for each distinct layer, the bytes that the layer keeps, recomputes, leaves for its
weight gradients and needs while it runs. This module multiplies them by the microbatches in flight, for which schedules
have closed forms, and adds the state (state_bytes.py) and ZeRO's buffers. The account replays the rank's own list of
actions instead, which takes thousands of times as long. A test compares the two (tests/memory/test_own_memory.py), and
the account judges the plans of a search before they are shown.
"""

from functools import partial
from typing import Any

import numpy as np

from shardwright.config.array_math import MixedError
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import sums_by_run
from shardwright.config.recompute_policy import KEEP_ALL, WHOLE_LAYER, Policy
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import FLOAT32_BYTES
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
from shardwright.memory.state_bytes import ElementBytes, HeldElements, state_bytes
from shardwright.sharding.groups import SHARDS, layout, num_replicas
from shardwright.sharding.optimizer_state import moments_of

_OF_LAYER, _OF_ENDS = 4, 8  # rows of a kind of layer, and of embedding, head and further tokens
# Policies of a search, asked for together: to make a layer takes longer than to ask it.
_USUAL = ("none", "attention", "activation+norm", "activation+attention+norm+qkv+up", "full")
_MESSAGES = 3  # of a pipeline, in transfer or waiting


def _all_kinds(run: Run, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The kinds of layers to ask the account for: the same for all plans of a search."""
    policies = dict.fromkeys((*_USUAL, *(_asked(policy) for _, policy in kinds)))
    of_model = dict.fromkeys((*shape_of(_job_of(run).model).kinds, *(kind for kind, _ in kinds)))
    return tuple((kind, policy) for kind in of_model for policy in policies)


def _asked(policy: str) -> str:
    return "none" if policy == "stage" else policy


def account_rows(run: Run, kinds: tuple[LayerKind, ...]) -> Array:
    """Bytes by plan, of shape (values, plans).

    The rows are, for each kind of layer, what a microbatch keeps, recomputes in its turn, leaves from I to W, and needs
    while it runs. After them come a stage's input, which is also the size of a message; bytes kept by the embedding and
    by every stage; bytes kept and needed by the head; and bytes that a module of further tokens keeps before its block,
    leaves from I to W, and needs there.
    """
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
    rows = []
    for kind, policy in kinds:
        layer = layers.get(kind)
        memory = LayerMemory.of(layer, policy_of(policy), works=True) if layer else _NO_LAYER
        rows += [memory.kept_bytes, memory.again_bytes, memory.deferred_bytes, memory.working_bytes]
    return [
        *rows,
        Share.of(job)[BLOCK.input],
        sum(embedding_kept(job).values()),
        sum(documents_kept(job).values()),
        sum(head_kept(job).values()),
        head_working_bytes(job),
        *_further_rows(job),
    ]


def _further_rows(job: JobSpec) -> list[Bytes]:
    """Bytes of all modules of further tokens, without their blocks: kept, left from I to W, and needed in the turn of
    the last module."""
    modules = list(further_layers(job, KEEP_ALL, works=False)) if job.model.mtp_layers else []
    if not modules:
        return [0, 0, 0]
    layer = LayerMemory.of(layer_of(job, job.model.layers), KEEP_ALL)
    kept, deferred = (
        sum(getattr(module, name) - getattr(layer, name) for module in modules)
        for name in ("kept_bytes", "deferred_bytes")
    )
    return [kept, deferred, len(modules) * Share.of(job)[BLOCK.input]]


_NO_LAYER = LayerMemory(KEEP_ALL, 0, 0, 0)


def policy_of(name: str) -> Policy:
    """The policy of a value of PlanGrid.recompute (layers/query.py). "stage" recomputes the whole stage at once, and
    then every layer keeps all its tensors until its backward."""
    if name == "stage":
        return KEEP_ALL
    return WHOLE_LAYER if name == "full" else named_operators(name)


def _account(run: Run, kinds: tuple[LayerKind, ...], memo: Memo) -> tuple[list[Array], Array]:
    """(for each kind of layer, the rows of it; the rows that come after them) of `account_rows`."""
    all_kinds = _all_kinds(run, kinds)
    words = all_kinds, *layer_words(run.grid)
    rows = memo.rows("account", run, words, _layer_columns, partial(account_rows, kinds=all_kinds))
    firsts = [_OF_LAYER * all_kinds.index((kind, _asked(policy))) for kind, policy in kinds]
    return [rows[first : first + _OF_LAYER] for first in firsts], rows[-_OF_ENDS:]


def held_activations(run: Run, ranks: PipelineRanks, memo: Memo) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Bytes of shape (ranks, plans): activations at the peak, working memory then, inputs on the host, messages.

    `kept`, `deferred` and `offloaded` are bytes of one microbatch, until the microbatches in flight multiply them.
    """
    grid = run.grid
    rows_of_kinds, rows_of_ends = _account(run, ranks.kinds, memo)
    stage_input, embedding, document_numbers, head, head_work, mtp_kept, mtp_deferred, mtp_input = rows_of_ends
    num_stages = grid.virtual * grid.num_copies  # of a rank
    kept: Numbers = ranks.embedding * embedding + document_numbers * num_stages + ranks.head * mtp_kept
    in_turn, offloaded, stage_recomputed = 0.0 * kept, 0.0 * kept, 0.0 * kept
    deferred, of_layer = ranks.head * mtp_deferred + in_turn, in_turn
    for (_, policy), num_layers, rows_of_kind in zip(ranks.kinds, ranks.layers, rows_of_kinds, strict=True):
        kind_kept, kind_recomputed, kind_deferred, kind_working = rows_of_kind
        deferred = deferred + num_layers * kind_deferred
        of_layer = np.maximum(of_layer, kind_deferred * (num_layers > 0))
        in_turn = np.maximum(in_turn, (kind_recomputed + kind_working) * (num_layers > 0))
        if policy == "stage":
            stage_recomputed = stage_recomputed + kind_kept * num_layers / num_stages
        else:
            kept = kept + num_layers * kind_kept
            if policy == "full":  # inputs but the stage's own wait on the host, and two are here in their turn
                offloaded = offloaded + num_layers * kind_kept * grid.offload_activations
                in_turn = in_turn + 2 * kind_kept * grid.offload_activations
    offloaded = np.maximum(0.0, offloaded - stage_input * (num_stages - ranks.embedding))
    if any(policy == "stage" for _, policy in ranks.kinds):
        kept = kept + stage_input * num_stages
        # The last stage is not recomputed. In a pair its microbatch is beside the one that is recomputed.
        stage_recomputed = stage_recomputed * (1 + ranks.head * grid.of_schedules(lambda facts: facts.pairs))
    p, m, alive = grid.pp, grid.num_microbatches, alive_microbatches(grid, ranks.rank)
    kept_then, waiting = grid.by_schedule(
        lambda name, at: np.stack(in_flight_split(name, p[at], _on_which_most_wait(name, ranks, p, at), m[at]))
    )
    on_device, of_stage = kept - offloaded, 1 / num_stages
    # Begin and end of the input gradient with which most wait. In its turn a layer does not wait itself.
    at_begin = on_device * (kept_then + of_stage) + deferred * (waiting - of_stage) + stage_recomputed
    at_end = on_device * kept_then + deferred * waiting - np.minimum(of_layer, in_turn)
    with_most_alive = on_device * alive * _unevenness(run) + stage_recomputed
    splits = waiting > 0
    activations = np.maximum(with_most_alive, splits * np.maximum(at_begin, at_end))
    activations = activations + ranks.head * head * waiting_losses(grid)
    working = np.maximum(in_turn - ranks.head * (head - mtp_input), ranks.head * head_work)
    return activations, np.maximum(0.0, working), offloaded * alive, _MESSAGES * stage_input * (p > 1)


def least_of_layer(run: Run, memo: Memo) -> tuple[Array, Array]:
    """Bytes of a layer on the device, of the kind that has least: (what a microbatch leaves for the backward, what is
    recomputed and needed beside in its turn). The first is 0 where a stage is recomputed at once. Numbers of the run
    are arrays."""
    kinds, left, needed = tuple(layers_by_kind(run.shape, run.grid)), list[Array](), list[Array]()
    rows_of_kinds, _ = _account(run, kinds, memo)
    for (_, policy), (kept, recomputed, _, working) in zip(kinds, rows_of_kinds, strict=True):
        left.append(kept * (1 - ((policy == "stage") | (policy == "full") * run.grid.offload_activations)))
        needed.append(recomputed + working)
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


def held_state(
    grid: PlanGrid, num_elements: tuple[Array, ...], by_matrix: tuple[Numbers, ...], frozen: tuple[Array, ...] = ()
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Bytes of (parameters, gradients, optimizer, host) of common elements, and of routed experts' if any; `by_matrix`
    has the number of each that are updated by matrix. Shards have no padding. `frozen` bytes, of the same two, are
    values alone."""
    totals: list[Numbers] = [0.0 * num_elements[0] for _ in range(4)]
    of_matrices, of_others = (
        len(moments_of(grid.optimizer, is_by_matrix)) * (grid.moment_bytes or FLOAT32_BYTES)
        for is_by_matrix in (True, False)
    )
    for elements, num_by_matrix, kind in zip(num_elements, by_matrix, SHARDS.values(), strict=False):
        moments = of_others + (of_matrices - of_others) * num_by_matrix / np.maximum(1.0, elements)
        shard = elements * np.where(grid.zero > 0, 1 / layout(grid, kind).size, 1.0)
        element = ElementBytes(
            grid.element_bytes,
            grid.gradient_bytes or FLOAT32_BYTES,
            moments,
            is_master=grid.element_bytes == FLOAT32_BYTES or not grid.has_masters,
        )
        are_values_hosted = (grid.zero == 3) * grid.offload_parameters
        num = HeldElements(elements, shard, shard * grid.offload_optimizer)
        held = state_bytes(num, element, grid.zero, are_values_hosted, is_one_memory=False)
        kinds = held.parameters, held.gradients, held.optimizer, held.host
        totals = [total + num_bytes for total, num_bytes in zip(totals, kinds, strict=True)]
    for num_bytes, kind in zip(frozen, SHARDS.values(), strict=False):
        shard = num_bytes * np.where(grid.zero == 3, 1 / layout(grid, kind).size, 1.0)
        is_hosted = (grid.zero == 3) * grid.offload_parameters
        totals[0] = totals[0] + shard * (1 - is_hosted)
        totals[3] = totals[3] + shard * is_hosted
    parameters, gradients, optimizer, host = totals
    return parameters, gradients, optimizer, host


def held_buffers(
    run: Run,
    ranks: PipelineRanks,
    common: Array,
    routed: Array,
    trained_share: Numbers = 1.0,
    stored_share: Numbers = 1.0,
) -> Numbers:
    """The most bytes that ZeRO borrows at once (sharding/zero_events.py), and the casts to fp8, which are kept with
    their values. `common` and `routed` are the elements of each rank; no other rank may share those of routed experts.
    A `trained_share` of them has gradients, and the values of layers take a `stored_share` of their bytes in the number
    type of the computation.

    The gradients of a layer arrive while those of two units are reduced, or those of whole stages if they are not
    reduced for each microbatch. In ZeRO-3 a pipeline gathers whole stages, two if their turns follow each other, and a
    model in one piece gathers two layers. The tables are units of their own.
    """
    grid = run.grid
    shares_routed = layout(grid, SHARDS[True]).size > 1 if run.shape.experts else True
    is_borrowed = shares_routed | (grid.offload_parameters > 0)
    num_borrowed = common + routed * is_borrowed
    table = run.shape.table_elements / grid.tp
    tables = table * ranks.num_tables(run.shape)
    num_layers = np.maximum(1, sum(ranks.layers))
    layer = np.maximum(0.0, num_borrowed - tables) / num_layers
    values, gradient = grid.element_bytes, (grid.gradient_bytes or FLOAT32_BYTES) * trained_share
    # The modules of further tokens use the table while the head is gathered, or on its way.
    num_tables = 2.0 if run.shape.mtp and not run.shape.tied else 1.0
    largest = np.minimum(tables, table) * np.where(ranks.head > 0, num_tables, 1.0)
    stage = np.maximum(0.0, num_borrowed - tables) / (grid.virtual * grid.num_copies) + largest
    stored = (stage - largest) * stored_share + largest
    stages, is_several = stage * grid.num_copies, grid.virtual > 1
    is_whole = grid.pp * grid.virtual == 1
    # The gradients of a single microbatch are reduced as they arrive; those of a single replica wait for the step.
    by_run = grid.by_schedule(lambda name, at: sums_by_run(name, grid.virtual[at], grid.reduce_each))
    by_run = (by_run * (grid.num_microbatches > 1) > 0) | (num_replicas(grid) == 1)
    stage2_bytes = gradient * np.where(by_run, stages, layer + tables)
    gathered = np.where(is_whole, 2 * layer * stored_share + largest, stored * grid.num_copies * (1 + is_several))
    stage3_bytes = values * gathered
    num_reducing = 1 if run.shape.experts else 2  # layers; experts are a unit of their own
    arriving = np.maximum((1 + num_reducing) * layer, num_reducing * layer + largest)
    next_stage = np.minimum(2 * layer, stage) * is_several
    stage3_bytes = stage3_bytes + gradient * np.where(by_run, stages + next_stage, np.minimum(arriving, stage))
    num_bytes = np.where(grid.zero == 3, stage3_bytes, np.where(grid.zero == 2, stage2_bytes, 0.0))
    is_gathered_from_host = (grid.zero == 3) & (grid.offload_parameters > 0)
    num_bytes = np.where((num_replicas(grid) > 1) | is_gathered_from_host, num_bytes, 0.0)
    if recipe := _job_of(run).precision.float8_facts:  # weights are kept in fp8
        resident_routed = routed * (1 - is_borrowed)  # they stay in memory
        num_bytes = num_bytes + recipe.num_weight_casts * (
            resident_routed + np.where(grid.zero < 3, num_borrowed - tables, stage)
        )
    if COMPRESSIONS[grid.compress].kept_elements is not None:
        num_bytes = num_bytes + FLOAT32_BYTES * (common + routed * shares_routed) * (num_replicas(grid) > 1)
    return num_bytes
