"""State of other software than this runtime, of many plans at once: what it keeps of parameters, gradients and moments,
and what their update needs. The facts are those of a description (config/software_memory.py)."""

from collections.abc import Sequence

import numpy as np

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.layer_tensors import FLOAT32
from shardwright.layers.query import PlanGrid, Run
from shardwright.layers.stage_contents import PipelineRanks
from shardwright.memory.allocator_slack import UpdateBytes
from shardwright.memory.gathered_weights import keeps_whole
from shardwright.memory.state_bytes import StateBytes
from shardwright.sharding.groups import SHARDS, layout, num_replicas
from shardwright.sharding.optimizer_state import moments_of


def held_by_software(
    grid: PlanGrid, software: SoftwareSpec, num_elements: tuple[Array, ...], by_matrix: tuple[Numbers, ...]
) -> StateBytes:
    """Bytes of common elements, and of routed experts' if any; `by_matrix`
    has the number of each that are updated by matrix.

    Float32 parameters are updated in place, others have a copy in float32, unless the plan has no master weights. In
    stage 3 that copy is the parameters, unless the software keeps both.
    The host has a gradient for each element that it updates (Ren et al. 2021, arXiv 2101.06840, section 4.1).
    """
    parameters: Numbers = 0.0
    gradients: Numbers = 0.0
    optimizer: Numbers = 0.0
    host: Numbers = 0.0
    element = grid.element_bytes if software.masters or not grid.has_masters else FLOAT32
    copy = FLOAT32 if element < FLOAT32 and grid.has_masters else 0
    facts, keeps_one = software.zero, grid.has_masters and not software.zero.copies_shards
    sharded, sharded_gradient = (FLOAT32, FLOAT32) if keeps_one else (element, software.gradient_bytes)
    of_matrices, of_others = (
        len(moments_of(grid.optimizer, is_by_matrix)) * software.moment_bytes for is_by_matrix in (True, False)
    )
    for elements, num_by_matrix, kind in zip(num_elements, by_matrix, SHARDS.values(), strict=False):
        moments = of_others + (of_matrices - of_others) * num_by_matrix / np.maximum(1.0, elements)
        is_whole = kind is SHARDS[True] and facts.whole_experts
        stage, ranks = (0 * grid.zero, 1) if is_whole else (grid.zero, layout(grid, kind).size)
        # Bytes an element.
        share, updated_share = 1 / ranks, np.where(stage > 0, 1 / ranks, 1.0)
        values = np.where(stage == 3, sharded * share, element)
        if facts.gathers_beside:
            values = np.where((stage == 2) & (ranks > 1), grid.element_bytes + element * share, values)
        gradient = np.where(stage == 3, sharded_gradient, software.gradient_bytes) * np.where(stage >= 2, share, 1.0)
        stays = keeps_whole(grid, software) & (num_replicas(grid) > 1)  # fully_shard copies what one rank has alone
        if facts.whole_gradients or facts.whole_in_pipeline:
            adds_up = facts.whole_gradients & (stage >= 2) & (np.asarray(grid.num_microbatches) > 1)
            gradient = np.where(adds_up | stays, software.scattered_bytes, gradient)
        values = values + grid.element_bytes * stays
        replicated = copy + moments + software.step_bytes
        updated = np.where(stage == 3, moments + copy * facts.copies_shards, replicated) * updated_share
        waiting = min(software.gradient_buckets, software.gradient_bytes) * (num_replicas(grid) > 1) * (grid.zero < 2)
        staying = software.gradient_copies * (software.gradient_bytes < FLOAT32)
        gradient = gradient + waiting + staying + software.bf16_gradient_copy
        if COMPRESSIONS[grid.compress].kept_elements is not None:
            gradient = gradient + FLOAT32 * (num_replicas(grid) > 1)
        parameters = parameters + elements * (values * (1 - grid.offload_parameters))
        gradients = gradients + elements * gradient * (1 - grid.offload_optimizer * facts.hosts_gradients * (stage > 0))
        optimizer = optimizer + elements * (updated * (1 - grid.offload_optimizer))
        offloaded = (FLOAT32 * updated_share + updated) * grid.offload_optimizer + values * grid.offload_parameters
        host = host + elements * offloaded
    return StateBytes(parameters, gradients, optimizer, host=host)


def frozen_bytes(run: Run, ranks: PipelineRanks) -> Numbers:
    """Bytes of the frozen weights beside adapters, which ZeRO-3 shards."""
    if not run.shape.is_adapted:
        return 0.0
    share = np.where(run.grid.zero == 3, 1 / layout(run.grid, SHARDS[False]).size, 1.0)
    return sum(ranks.frozen_bytes(run.shape, run.grid)) * share


def table_elements(run: Run, ranks: PipelineRanks) -> Numbers:
    """Elements of the tables of embeddings and heads that a rank holds."""
    return run.shape.table_elements / run.grid.tp * ranks.num_tables(run.shape)


def float8_bytes(run: Run, software: SoftwareSpec, num_elements: Numbers) -> Numbers:
    """Bytes that the `num_elements` of a rank's layers take more where products are in fp8: casts that stay, unless the
    parameters themselves are in fp8, in which ZeRO-2 has a byte less of what it gathers."""
    if NUMBER_TYPES[run.grid.precision].peak != "float8":
        return 0.0 * num_elements
    if not software.float8_gather:
        return software.float8_weights * num_elements
    is_beside = software.zero.gathers_beside & (run.grid.zero == 2) & (num_replicas(run.grid) > 1)
    return -1.0 * num_elements * is_beside


def copied_for_update(grid: PlanGrid, software: SoftwareSpec, num_elements: Sequence[Array]) -> Numbers:
    """Bytes of the copies of a moment and of gradients that the update makes of all elements that a rank updates on its
    device."""
    shares = (
        elements / np.where(grid.zero > 0, layout(grid, kind).size, 1.0)
        for elements, kind in zip(num_elements, SHARDS.values(), strict=False)
    )
    cast_bytes = FLOAT32 * (software.casts_gradients and software.gradient_bytes < FLOAT32)
    copied = software.moment_copies * software.moment_bytes + cast_bytes
    return copied * sum(shares) * (1 - grid.offload_optimizer)


def fresh_gradients(grid: PlanGrid, gradients: Numbers, step_bytes: Numbers, last_bytes: Numbers) -> Numbers:
    """The bytes of gradients that count at the peak, if a step of one microbatch makes them one by one: its loss has
    none beside it, and all are there with the `last_bytes` of the backward of the first layer, or of the update."""
    counted = np.maximum(step_bytes, gradients + last_bytes) - np.maximum(step_bytes, last_bytes)
    return np.where(np.asarray(grid.num_microbatches) > 1, gradients, counted)


def new_at_update(software: SoftwareSpec, grid: PlanGrid, for_update: UpdateBytes, optimizer_bytes: Numbers) -> Numbers:
    """Bytes of blocks for the update that were made for it alone. In software that gathers into copies the first update
    makes the moments in blocks of activations that are free then, so that later copies have theirs."""
    if not software.gathers_copies:
        return for_update.reserved
    moments = len(moments_of(grid.optimizer, False)) * software.moment_bytes
    return np.maximum(0.0, for_update.reserved - optimizer_bytes * moments / (moments + FLOAT32))
