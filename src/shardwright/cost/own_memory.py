"""Memory of this runtime, of many plans at once: the account (account/) in arrays.

What a layer keeps, makes again, leaves for its weight gradients and needs while it runs is asked of the account itself,
once for each distinct layer. Here it is multiplied by microbatches in flight, of which schedules have closed forms, and
the state and ZeRO's buffers are added. The account plays the rank's own list of actions instead, which takes thousands
of times as long; a test compares the two (tests/cost/test_own_memory.py), and what a search finds is judged by the
account before it is shown.
"""

from functools import partial
from typing import Any

import numpy as np

from shardwright.account.activations import (
    documents_kept,
    embedding_kept,
    head_kept,
    head_working_bytes,
    layer_of,
)
from shardwright.account.further_tokens import further_layers
from shardwright.account.kept_tensors import Bytes, Share
from shardwright.account.layer_memory import LayerMemory
from shardwright.config.array_math import MixedError
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import sums_by_run
from shardwright.config.recompute_policy import KEEP_ALL, WHOLE_LAYER, Policy
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.pipeline_bubble import in_flight, in_flight_split
from shardwright.sharding.groups import SHARDS, layout
from shardwright.sharding.optimizer_state import moments_of
from shardwright.workload.arrays import Array, Numbers, distinct
from shardwright.workload.memo import Memo, layer_columns, layer_words
from shardwright.workload.query import PlanGrid, Run
from shardwright.workload.stage_contents import LayerKind, PipelineRanks

_FLOAT = 4
_OF_LAYER, _OF_ENDS = 4, 8  # rows of a kind of layer, and of what is not of layers
# Policies of which a layer is asked at once, for a search has them all: a layer takes longer to make than to ask.
_USUAL = ("none", "attention", "activation+norm", "activation+attention+norm+qkv+up", "full")
_MESSAGES = 3  # of a pipeline on their way, or waiting


def _all_kinds(run: Run, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The kinds of layers to ask the account for, which are the same for all plans of a search."""
    policies = dict.fromkeys((*_USUAL, *(_asked(policy) for _, policy in kinds)))
    of_model = dict.fromkeys((*shape_of(_job_of(run).model).kinds, *(kind for kind, _ in kinds)))
    return tuple((kind, policy) for kind in of_model for policy in policies)


def _asked(policy: str) -> str:
    return "none" if policy == "stage" else policy


def account_rows(run: Run, kinds: tuple[LayerKind, ...]) -> Array:
    """Bytes by plan, (values, plans): of each kind of layer what a microbatch keeps, makes again in its turn, leaves
    from I to W, and needs while it runs; then a stage's input, which is a message too, what the embedding keeps, what
    every stage does, of the head what it keeps and needs, and of a module of further tokens what it keeps before its
    block, leaves from I to W and needs there."""
    grid, job = run.grid.as_arrays(), _job_of(run)
    table = np.empty((_OF_LAYER * len(kinds) + _OF_ENDS, len(grid.tp)))
    firsts, which = distinct(_asked_together(job, grid))
    parts = [np.flatnonzero(which == number) for number in range(len(firsts))]
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
    """Columns of plans that are equal where the account may take several at once: where the same is shared. Where the
    room of experts is rounded, that is each by itself."""
    columns = [grid.sequence_parallel, grid.tp > 1, grid.cp > 1, grid.ep > 1, grid.expert_tp == grid.tp]
    if job.model.moe.experts and job.model.moe.capacity(1) is not None:
        columns = [grid.sequence_parallel, grid.tp, grid.cp, grid.ep, grid.expert_tp, grid.microbatch]
    return tuple(column.astype(np.int64) for column in columns)


def _job_of(run: Run) -> JobSpec:
    assert run.job is not None, "a run of this runtime is of a job"
    return run.job


def _with_layers(job: JobSpec, grid: PlanGrid, plans: Array) -> JobSpec:
    """A job with the layers of some plans: numbers that differ are arrays. Checks nothing."""
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
        Share.of(job)["input"],
        sum(embedding_kept(job).values()),
        sum(documents_kept(job).values()),
        sum(head_kept(job).values()),
        head_working_bytes(job),
        *_further_rows(job),
    ]


def _further_rows(job: JobSpec) -> list[Bytes]:
    """The bytes of all modules of further tokens together: kept besides their blocks, left from I to W, and added to
    that of its block in the last one's turn."""
    modules = list(further_layers(job, KEEP_ALL, works=False)) if job.model.mtp_layers else []
    if not modules:
        return [0, 0, 0]
    layer = LayerMemory.of(layer_of(job, job.model.layers), KEEP_ALL)
    kept, waits = (
        sum(getattr(one, name) - getattr(layer, name) for one in modules) for name in ("kept_bytes", "deferred_bytes")
    )
    return [kept, waits, len(modules) * Share.of(job)["input"]]


_NO_LAYER = LayerMemory(KEEP_ALL, 0, 0, 0)


def policy_of(name: str) -> Policy:
    """The policy that a cut calls by a name (workload/query.py); of a stage that runs again each layer keeps all."""
    if name in ("none", "stage"):
        return KEEP_ALL
    return WHOLE_LAYER if name == "full" else frozenset(name.split("+"))


def held_activations(run: Run, ranks: PipelineRanks, memo: Memo) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Bytes by rank and plan, (ranks, plans): of activations at the peak, of working memory then, of inputs that are on
    the host, and of messages."""
    grid = run.grid
    asked = _all_kinds(run, ranks.kinds)
    rows = memo.rows("account", run, (asked, *layer_words(grid)), layer_columns, partial(account_rows, kinds=asked))
    stage_input, embedding, documents, head, head_works, further, further_waits, beside = rows[-_OF_ENDS:]
    kept: Numbers = ranks.embedding * embedding + documents * grid.virtual + ranks.head * further
    turn, away, stage_again = 0.0 * kept, 0.0 * kept, 0.0 * kept
    waits = ranks.head * further_waits + turn
    for (kind, policy), count in zip(ranks.kinds, ranks.layers, strict=True):
        first = _OF_LAYER * asked.index((kind, _asked(policy)))
        mine, again, later, works = rows[first : first + _OF_LAYER]
        waits = waits + count * later
        turn = np.maximum(turn, (again + works) * (count > 0))
        if policy == "stage":
            stage_again = stage_again + mine * count / grid.virtual
        else:
            kept = kept + count * mine
            if policy == "full":  # all but a stage's own input wait on the host, and two are here in their turn
                away = away + count * mine * grid.offload_activations
                turn = turn + 2 * mine * grid.offload_activations
    away = np.maximum(0.0, away - stage_input * (grid.virtual * grid.num_copies - ranks.embedding))
    if any(policy == "stage" for _, policy in ranks.kinds):
        kept = kept + stage_input * grid.virtual
    p, m, v, extra = grid.pp, grid.num_microbatches, grid.virtual, grid.extra_warmup
    alive = grid.by_schedule(
        lambda name, at: in_flight(name, p[at], ranks.rank[:, at], m[at], v=v[at], extra_warmup=extra[at])
    )
    split = grid.by_schedule(
        lambda name, at: np.stack(in_flight_split(name, p[at], _on_which_most_wait(name, ranks, p, at), m[at]))
    )
    whole = np.maximum((kept - away) * alive * _unevenness(run), (kept - away) * split[0] + waits * split[1])
    activations = whole + stage_again + ranks.head * head
    working = np.maximum(turn - ranks.head * (head - beside), ranks.head * head_works)
    return activations, np.maximum(0.0, working), away * alive, _MESSAGES * stage_input * (p > 1)


def _unevenness(run: Run) -> Numbers:
    """How much more the largest stages keep than the mean one, where microbatches gather in some of a rank's stages."""
    grid, layers = run.grid, run.shape.layers
    stages = grid.pp * grid.virtual
    uneven = -(-layers // stages) * stages / layers
    return np.where(grid.of_schedules(lambda facts: facts.keeps_unevenly), uneven, 1.0)


def _on_which_most_wait(schedule: str, ranks: PipelineRanks, p: Array, at: Any) -> Array:
    """The rank, of pipeline ranks that hold alike, on which most microbatches wait for their weight gradients: the last
    of them, or of DualPipe's the middle."""
    rank, is_first, is_last = ranks.rank[:, at], ranks.embedding[:, at] > 0, ranks.head[:, at] > 0
    facts = SCHEDULES[schedule]
    if facts.num_copies > 1:
        return np.where(is_first | is_last, rank, p[at] // 2 - 1)
    last = p[at] - 1 if facts.are_alternating else np.maximum(rank, p[at] - 2)  # of others the last has the head
    return np.where(is_first, rank, np.where(is_last, p[at] - 1, last))


def held_state(
    grid: PlanGrid, held: tuple[Array, ...], by_matrix: tuple[Numbers, ...]
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Bytes of (parameters, gradients, optimizer, what the host holds) of common elements, and routed experts' if any,
    of which so many are updated by matrix; as account/job_memory.py counts them, without padding."""
    parameters, gradients, optimizer, host = (0.0 * held[0] for _ in range(4))
    values = grid.element_bytes
    gradient = grid.gradient_bytes or _FLOAT
    master = _FLOAT if values < _FLOAT else 0
    of_matrices, of_others = (
        len(moments_of(grid.optimizer, which)) * (grid.moment_bytes or _FLOAT) for which in (True, False)
    )
    for elements, of_these, kind in zip(held, by_matrix, SHARDS.values(), strict=False):
        moments = of_others + (of_matrices - of_others) * of_these / np.maximum(1.0, elements)
        shards = layout(grid, kind).size
        mine = elements * np.where(grid.zero == 3, 1 / shards, 1.0)
        updated = elements * np.where(grid.zero > 0, 1 / shards, 1.0)
        parameters = parameters + values * mine * (1 - grid.offload_parameters)
        gradients = gradients + gradient * elements * np.where(grid.zero >= 2, 1 / shards, 1.0)
        optimizer = optimizer + updated * (moments + master) * (1 - grid.offload_optimizer)
        hosted = moments + _FLOAT + master  # with a copy of the gradient
        host = host + updated * hosted * grid.offload_optimizer + values * mine * grid.offload_parameters
    return parameters, gradients, optimizer, host


def held_buffers(run: Run, ranks: PipelineRanks, common: Array, routed: Array) -> Numbers:
    """Most bytes that ZeRO borrows at once (sharding/zero_events.py), of so many elements of each rank, common ones and
    those of routed experts, which no other rank may share. And casts to fp8, which are kept with their values.

    Gradients of a layer arrive while those of two units are summed, or those of whole stages where they are not summed
    with each microbatch. Of values a pipeline has whole stages in stage 3, of two where their turns follow each other,
    and a model in one piece two layers. Beside that the tables are units of their own.
    """
    grid = run.grid
    shares_routed = layout(grid, SHARDS[True]).size > 1 if run.shape.experts else True
    is_borrowed = shares_routed | (grid.offload_parameters > 0)
    held = common + routed * is_borrowed
    table = run.shape.table_elements / grid.tp
    tables = table * ranks.num_tables(run.shape)
    num_layers = np.maximum(1, sum(ranks.layers))
    layer = np.maximum(0.0, held - tables) / num_layers
    values, gradient = grid.element_bytes, grid.gradient_bytes or _FLOAT
    # What predicts further tokens looks them up while the head is there, or on its way.
    at_once = 2.0 if run.shape.mtp and not run.shape.tied else 1.0
    largest = np.minimum(tables, table) * np.where(ranks.head > 0, at_once, 1.0)
    stage = np.maximum(0.0, held - tables) / (grid.virtual * grid.num_copies) + largest
    stages, is_several = stage * grid.num_copies, grid.virtual > 1
    is_whole = grid.pp * grid.virtual == 1
    # Of a single microbatch they are summed as they come.
    by_run = grid.by_schedule(lambda name, at: sums_by_run(name, grid.virtual[at], grid.reduce_each))
    by_run = (by_run * (grid.num_microbatches > 1)) > 0
    of_two = gradient * np.where(by_run, stages, layer + tables)
    of_three = values * np.where(is_whole, 2 * layer + largest, stages * (1 + is_several))
    num_reducing = 1 if run.shape.experts else 2  # layers; experts are a unit of their own
    arriving = np.maximum((1 + num_reducing) * layer, num_reducing * layer + largest)
    more = np.minimum(2 * layer, stage) * is_several
    of_three = of_three + gradient * np.where(by_run, stages + more, np.minimum(arriving, stage))
    num_bytes = np.where(grid.zero == 3, of_three, np.where(grid.zero == 2, of_two, 0.0))
    num_bytes = np.where(grid.replicas > 1, num_bytes, 0.0)
    if grid.precision == "fp8":  # weights are kept in fp8, for both products where a scale is for one direction
        num_casts = 2 if _job_of(run).precision.float8 == "rowwise" else 1
        of_routed = routed * (1 - is_borrowed)  # which stay
        num_bytes = num_bytes + num_casts * (of_routed + np.where(grid.zero < 3, held - tables, stage))
    if COMPRESSIONS[grid.compress].kept_elements is not None:
        num_bytes = num_bytes + _FLOAT * (common + routed * shares_routed) * (grid.replicas > 1)
    return num_bytes
