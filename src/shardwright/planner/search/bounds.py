"""Lower bounds on the price of a plan, from prices of cheaper plans. Plans that they exclude need not be priced.

A bound is admissible if no plan that it stands for is cheaper. Three relaxations give one:

- The slowest rank of a pipeline takes at least as long as the mean rank, which computes 1 / pp of all layers. So
  `microbatch_s` prices all layers of the model, without messages, replicas' communication or update;
  `mean_rank_token_s` divides them, and `bubble_factor` adds the least bubble of a schedule.
- Most schedules keep at least as many microbatches as 1F1B. So `least_bytes` of 1F1B, with nothing sharded and
  without all memory that sharding could save, is a lower bound for them.
- Sharding and offloading move state and add communication, and change nothing else. So `unsharded_token_s` of a plan
  with nothing sharded is a lower bound for every sharding of it. Below ZeRO-3 the least communication of replicas is
  added (`exchange_token_s`). Under ZeRO-3 computation hides gathers, so `zero3_token_s` without recompute is a lower
  bound with recompute. The update of a sharded plan comes on top (`update_token_s`); in host memory it may take longer
  than all else (`offloaded_token_s`).

Times are seconds a token, since plans may have different batches. tests/planner/test_search.py compares with prices.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.cost.calibration import Constants, Rates, rates_of
from shardwright.cost.from_job import run_of
from shardwright.cost.piece_time import PieceTime
from shardwright.layers.layer_tensors import FLOAT32
from shardwright.layers.memo import Memo, shard_words
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.own_memory import least_of_layer
from shardwright.memory.rank_estimate import Memory, is_counted, peak_memory
from shardwright.planner.search import space
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import SHARING, Column, Columns, PlanBlock, PlanVariant, rank_grid, select
from shardwright.sharding.groups import SHARDS, layout
from shardwright.simulate.closed_form import (
    least_before_experts_s,
    message_and_turn_s,
    microbatch_time,
    pipeline_s,
    step_time,
    update_s,
)

SURE_STATE = 0.9  # share of the least state that a plan surely needs: vocabularies and shards are rounded up


def variants_by_bound(variants: Iterable[PlanVariant]) -> dict[PlanVariant, list[PlanVariant]]:
    """Variants, grouped by the fields on which bounds depend: all but the schedule."""
    groups: dict[PlanVariant, list[PlanVariant]] = {}
    for variant in variants:
        groups.setdefault(replace(variant, schedule="1f1b"), []).append(variant)
    return groups


def plain(rows: Columns) -> Columns:
    """Rows of degrees as plans with one stage a rank and nothing sharded."""
    zeros = np.zeros_like(rows["dp"])
    return rows | dict.fromkeys(SHARING, zeros) | {"virtual_stages": zeros + 1}


def microbatch_s(
    job: JobSpec, rows: Columns, variant: PlanVariant, constants: Constants, memo: Memo
) -> tuple[Column, Column]:
    """Seconds that all pipeline ranks together compute and communicate for a microbatch, under any schedule.

    The second value is for schedules that hide dispatch and combine. Both depend only on `layer_columns`.
    """
    time = _microbatch(job, plain(rows), variant, constants, memo=memo)
    return time.without_dispatch + time.expert, time.without_dispatch


def before_experts_s(job: JobSpec, rows: Columns, variant: PlanVariant, constants: Constants, memo: Memo) -> Column:
    """A lower bound on both values of `microbatch_s`, with any recomputation: without the experts, by whose groups most
    rows differ."""
    run = PlanBlock(replace(variant, schedule="1f1b"), plain(rows)).run(job, memo)
    return np.asarray(least_before_experts_s(run, constants, memo))


def mean_rank_token_s(job: JobSpec, rows: Columns, microbatch_s: Column) -> Column:
    """Seconds a token of the mean pipeline rank in a step, if all ranks together take `microbatch_s` for a
    microbatch."""
    return np.asarray(microbatch_s / (rows["dp"] * rows["microbatch_size"] * rows["pp"] * job.model.sequence))


def zero3_token_s(
    job: JobSpec, rows: Columns, variant: PlanVariant, hybrid: Column, constants: Constants, memo: Memo
) -> Column:
    """A lower bound on seconds a token under ZeRO-3 and any schedule. It is the least of sharding over all replicas,
    over `hybrid` replicas if not 0, and over those of both copies of a stage, which may be nearer to each other."""
    least_s, ranks = np.full(len(hybrid), np.inf), rank_grid(rows)
    all_rows, no_hybrid = np.arange(len(hybrid)), np.zeros_like(hybrid)
    mirrored = np.flatnonzero((ranks.block < ranks.stage_ranks) & (rows["pp"] % 2 == 0))
    # A rank with one stage gathers least often, and gradients are scattered least often after each stretch ("run").
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"reduce_each": "run"})})
    cases = [("1f1b", no_hybrid, all_rows), ("1f1b", hybrid, all_rows)]
    cases += [(name, no_hybrid, mirrored) for name in searched() if SCHEDULES[name].num_copies > 1]
    for schedule, zero_ranks, places in cases:
        if not len(places):
            continue
        schedule_numbers = np.full_like(hybrid, SCHEDULES.names.index(schedule))
        columns = plain(rows) | {
            "zero": np.full_like(hybrid, 3),
            "zero_ranks": zero_ranks,
            "schedule": schedule_numbers,
        }
        time = _microbatch(job, select(columns, places), variant, constants, memo=memo)
        compute_s = time.forward + time.input_grad + time.weight_grad + time.again
        seconds = compute_s + time.tensor + time.context + time.shard
        least_s[places] = np.minimum(least_s[places], seconds)
    return mean_rank_token_s(job, rows, least_s)


def _microbatch(job: JobSpec, columns: Columns, variant: PlanVariant, constants: Constants, memo: Memo) -> PieceTime:
    return microbatch_time(PlanBlock(replace(variant, schedule="1f1b"), columns).run(job, memo), constants, memo)


def exchange_token_s(job: JobSpec, rows: Columns, hybrid: Column, constants: Constants, memo: Memo) -> Column:
    """Least seconds a token of the communication of replicas at the end of a step below ZeRO-3; `hybrid` replicas may
    share shards.

    If the software hides it, only the slowdown of the computation counts. With other virtual stages a rank may have one
    layer less.
    """
    software = software_of(job.cluster.software)
    least = np.full(len(rows["dp"]), np.inf)
    ones = np.ones_like(rows["dp"])
    for zero, zero_ranks in ((0 * ones, 0 * ones), (ones, 0 * ones), (ones, hybrid)):
        columns = plain(rows) | {"zero": zero, "zero_ranks": zero_ranks}
        least = np.minimum(least, step_time(PlanBlock(PlanVariant(), columns).run(job, memo), constants, memo).data)
    share = (job.model.layers // rows["pp"]) / -(-job.model.layers // rows["pp"])
    if software.reduce_overlap or software.gather_overlap or software.update_overlap:
        share = share * rates_of(run_of(job), constants).leak
    return least * share / (rows["global_batch_size"] * job.model.sequence)


def turn_token_s(job: JobSpec, rows: Columns, rates: Rates) -> Column:
    """Seconds a token of the messages of each stage of a rank that has several stages."""
    seconds = message_and_turn_s(PlanBlock(PlanVariant(), plain(rows)).run(job, Memo()), rates)[1]
    return np.where(rows["pp"] > 1, seconds / (rows["global_batch_size"] * job.model.sequence), 0.0)


def messages_token_s(rows: Columns, schedule: str, virtual: Column | int) -> Column:
    """Least seconds a token of a schedule's messages; rows have `turn_s`."""
    return rows["turn_s"] * virtual if SCHEDULES[schedule].stages_per_rank != 1 else 0.0 * rows["turn_s"]


def step_token_s(
    job: JobSpec, rows: Columns, token_s: Column, rates: Rates, factor: Column | float = 1.0
) -> tuple[Column, Column]:
    """Least seconds a token of a whole step (below ZeRO-3, under ZeRO-3), from the time `token_s` of its ranks.

    Rows have `exchange_s`, and `zero3_s` of the mean rank under ZeRO-3, which the bubble multiplies by `factor`. The
    constant overhead of a step is added, and all is multiplied for the jitter of many nodes.
    """
    overhead_s = rates.step_s / (rows["global_batch_size"] * job.model.sequence)
    jitter_factor = _jitter_factor(job, rates)
    below_s = jitter_factor * (token_s + rows["exchange_s"] + overhead_s)
    return below_s, jitter_factor * (np.maximum(token_s, factor * rows["zero3_s"]) + overhead_s)


def update_token_s(job: JobSpec, block: PlanBlock, rates: Rates, constants: Constants, memo: Memo) -> Column:
    """Seconds a token of the update of sharded plans, on the device and in host memory: `step_token_s` has none."""
    seconds = _jitter_factor(job, rates) * update_s(block.run(job, memo), constants, memo)
    return np.asarray(seconds / (block.columns["global_batch_size"] * job.model.sequence))


def must_offload(job: JobSpec, block: PlanBlock, room: float, memo: Memo) -> Column:
    """Mask of the plans of an unsharded block that have no room with any sharding, unless they offload. Columns are as
    for `state_bytes`."""
    return np.asarray(_most_sharded_bytes(job, block, memo) > room)


def _most_sharded_bytes(job: JobSpec, block: PlanBlock, memo: Memo) -> Column:
    """Least bytes of a process that offloads nothing, with any sharding: ZeRO-3 over all replicas takes the least.
    Columns are as for `state_bytes`."""
    zeros = np.zeros(len(block), np.int64)
    sharding = {"zero": zeros + 3, "zero_ranks": zeros, "offload_optimizer": 0.0 * zeros}
    return state_bytes(job, PlanBlock(block.variant, block.columns | sharding), memo)[1]


def offloaded_token_s(
    job: JobSpec, block: PlanBlock, hybrid: Column, share: float, *, constants: Constants, memo: Memo
) -> Column:
    """Least seconds a token of the update of plans of an unsharded block with any sharding, if a share of their
    optimizer state is in host memory; `hybrid` replicas may share shards.

    Thousands of plans differ only in what an update does not depend on.
    """

    def least_s(run: Run) -> Column:
        zeros, hybrid_of_each = np.zeros_like(run.grid.zero), run.grid.zero_ranks
        cases = [(zeros, zeros), *((zeros + zero, ranks) for zero in (1, 3) for ranks in (zeros, hybrid_of_each))]
        offloaded = {"offload_optimizer": np.full(len(zeros), share)}
        runs = (
            replace(run, grid=run.grid.having(offloaded | {"zero": zero, "zero_ranks": zero_ranks}))
            for zero, zero_ranks in cases
        )
        return np.min([np.broadcast_to(update_s(case, constants, memo), zeros.shape) for case in runs], axis=0)[None]

    run = PlanBlock(block.variant, block.columns | {"zero_ranks": hybrid}).run(job, memo)
    words = share, *shard_words(run.grid)
    (seconds,) = memo.rows("offloaded update", run, words, _update_columns, least_s)
    jitter_factor = _jitter_factor(job, rates_of(run_of(job), constants))
    return np.asarray(jitter_factor * seconds / (block.columns["global_batch_size"] * job.model.sequence))


def _update_columns(grid: PlanGrid) -> tuple[Column, ...]:
    """The numbers of a plan on which the time of its update depends, besides those of `offloaded_token_s`."""
    ranks = (grid.tp, grid.pp, grid.cp, grid.dp, grid.ep, grid.expert_tp, grid.order_number)
    return *ranks, grid.virtual, grid.schedule_number, grid.zero_ranks


def _jitter_factor(job: JobSpec, rates: Rates) -> float:
    """The factor by which the jitter of many nodes makes a step longer."""
    return 1.0 + rates.jitter * math.log2(max(1.0, job.cluster.num_devices / rates.domain))


def is_paired(schedule: str) -> bool:
    """True if the second bound of `mean_rank_token_s` holds for a schedule."""
    return SCHEDULES[schedule].pairs


def bubble_factor(columns: Columns, schedule: str, virtual: Column | int) -> Column:
    """Least time of a step with its schedule's bubble, over that of the mean rank. A rank has at most `virtual`
    stages."""
    if not SCHEDULES[schedule].fills_and_drains:
        return np.ones(len(columns["dp"]))
    num_microbatches = columns["global_batch_size"] // (columns["dp"] * columns["microbatch_size"])
    return np.asarray(1.0 + (columns["pp"] - 1) / (virtual * num_microbatches))


def least_bytes(
    job: JobSpec, rows: Columns, variant: PlanVariant, constants: Constants, memo: Memo
) -> tuple[Column, Column]:
    """Least bytes of a process under a schedule that keeps as much as 1F1B, with any sharding: (without all memory that
    sharding and offloading could save, with what is on the device unless the plan offloads).

    If layers do not divide evenly, a rank with other virtual stages may have one layer less. Which layers with experts
    a rank has depends on its virtual stages: then each layer is taken to be of the kind that has least.
    """
    block = PlanBlock(replace(variant, schedule="1f1b"), plain(rows))
    if job.model.moe.experts:
        num_microbatches = rows["global_batch_size"] // (rows["dp"] * rows["microbatch_size"])
        num_kept = (job.model.layers // rows["pp"]) * np.minimum(rows["pp"], num_microbatches)
        left_bytes, needed_bytes = least_of_layer(block.run(job, memo), memo)
        rank_bytes = num_kept * left_bytes + needed_bytes
        return rank_bytes, rank_bytes
    memory = peak_memory(block.run(job, memo), constants, memo)
    share = (job.model.layers // rows["pp"]) / -(-job.model.layers // rows["pp"])
    on_device = _most_sharded_bytes(job, PlanBlock(block.variant, block.columns | unsharded_parts(job, memory)), memo)
    return unsharded_bytes(job, memory) * share, on_device * share


def least_state_bytes(job: JobSpec, constants: Constants) -> float:
    """About the least bytes of a model's state for each device, in its memory and the host's together: those of
    sharding over all devices."""
    return _state_of(job, job.cluster.num_devices, 3, constants)


def has_room_for_state(job: JobSpec, constraints: Constraints, room: float, constants: Constants) -> bool:
    """False if `room` bytes of each device, and its share of its host where plans may use that, surely can't hold the
    model's state."""
    if space.may_use_host(constraints):
        return SURE_STATE * least_state_bytes(job, constants) <= room + host_room_bytes(job.cluster)
    recipes = {job.precision.float8, constraints.float8}
    jobs = [job.model_copy(update={"precision": job.precision.with_float8(name)}) for name in recipes]
    return min(device_state_bytes(in_float8, constants) for in_float8 in jobs) <= room


def device_state_bytes(job: JobSpec, constants: Constants) -> float:
    """Bytes of state that some device has under every plan that keeps none in host memory: the mean of all devices, if
    nothing is held twice and nothing is rounded up. Bytes by parameter are the least of all ZeRO stages."""
    devices = job.cluster.num_devices
    return min(_state_of(job, dp, zero, constants) * dp / devices for zero in range(4) for dp in {1, devices})


def _state_of(job: JobSpec, dp: int, zero: int, constants: Constants) -> float:
    """Bytes of a device's parameters, gradients and optimizer state if `dp` devices have replicas and share them as
    a ZeRO stage does."""
    plan = job.plan.unsearched().model_copy(update={"dp": dp, "zero": zero})
    memory = peak_memory(run_of(job.model_copy(update={"plan": plan})), constants)
    return float(memory.parameters + memory.gradients + memory.optimizer)


def unsharded_bytes(job: JobSpec, memory: Memory) -> Column:
    """Least bytes of a process with any sharding, from the memory of the plan with nothing sharded."""
    if _copies_at_update(software_of(job.cluster.software)):
        return np.asarray(memory.activations)
    return np.asarray(memory.process - memory.parameters - memory.gradients - memory.optimizer)


def _copies_at_update(software: SoftwareSpec) -> bool:
    """True if blocks that software makes for the update, of what a rank updates, may be the peak of a step: with a
    sharded state they are smaller, and so is the rest of a process, but for its activations."""
    has_blocks = software.update_blocks or software.bf16_update_blocks
    return bool(has_blocks or software.gathers_copies or software.moment_copies or software.casts_gradients)


def unsharded_parts(job: JobSpec, memory: Memory) -> Columns:
    """The columns that `state_bytes` reads, from the memory of the plans with nothing sharded."""
    return {
        "rest_bytes": unsharded_bytes(job, memory),
        "parameters_bytes": memory.parameters,
        "gradients_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
    }


def state_bytes(job: JobSpec, block: PlanBlock, memo: Memo) -> tuple[Column, Column]:
    """Least bytes of a process (with all of its optimizer state in host memory, with that share of it which the plan
    offloads), from the unsharded parts of its memory.

    Columns have those of `unsharded_parts`.
    """
    columns, grid = block.columns, block.run(job, memo).grid
    zero = columns["zero"]
    share = 1 / np.maximum(*(layout(grid, shards).size for shards in SHARDS.values()))
    software = software_of(job.cluster.software)
    kept = np.where(zero < 3, 1.0, 0.0)  # of the parameters
    if software.zero.gathers_beside:  # what ZeRO-2 gathered is narrower, and its shards beside it may be small
        kept = np.where(zero == 2, (grid.element_bytes - software.float8_gather) / FLOAT32, kept)
    rest = columns["rest_bytes"] + columns["parameters_bytes"] * kept
    gradients = columns["gradients_bytes"] * np.where(zero < 2, 1.0, share)
    if software.lone_loss:  # those of a lone microbatch count as far as they are beside the backward's end
        gradients = gradients * (grid.num_microbatches > 1)
    hosted = software.zero.hosts_gradients * (zero > 0)  # of gradients, where the optimizer state is in host memory
    offloaded = columns["offload_optimizer"]
    on_device = np.where(zero < 1, 1.0, share) * (1 - offloaded)
    if not software.is_own:  # under ZeRO-3 its master weights are the parameters
        on_device = on_device * (zero < 3)
    least = rest + gradients * (1 - hosted)
    return least, rest + gradients * (1 - hosted * offloaded) + columns["optimizer_bytes"] * on_device


def keeps_as_much(job: JobSpec, variant: PlanVariant) -> bool:
    """True if `least_bytes` holds for a variant: as much is recomputed at once as under 1F1B. Of models with experts it
    is known for this runtime."""
    has_smaller_stages = RECOMPUTES[variant.recompute].by_stage and SCHEDULES[variant.schedule].stages_per_rank != 1
    is_known = not job.model.moe.experts or is_counted(run_of(job))
    return SCHEDULES[variant.schedule].keeps_as_1f1b and is_known and not has_smaller_stages


def unsharded_token_s(job: JobSpec, block: PlanBlock, constants: Constants, memo: Memo) -> Column:
    """Least seconds a token of the plans of an unsharded block, with any sharding."""
    seconds = pipeline_s(block.run(job, memo), constants, memo)
    return np.asarray(seconds / (block.columns["global_batch_size"] * job.model.sequence))
