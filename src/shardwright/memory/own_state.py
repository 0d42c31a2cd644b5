"""State and buffers of this runtime, of many plans at once: parameters, gradients and moments between steps, and what
ZeRO borrows for a while (sharding/zero_events.py). A test compares them with the account
(tests/memory/test_own_memory.py)."""

import numpy as np

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.plan import sums_by_run
from shardwright.config.units import FLOAT32_BYTES
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.query import PlanGrid, Run
from shardwright.layers.stage_contents import PipelineRanks
from shardwright.memory.state_bytes import ElementBytes, HeldElements, StateBytes, state_bytes
from shardwright.sharding.groups import SHARDS, layout, num_replicas
from shardwright.sharding.optimizer_state import moments_of


def held_state(
    grid: PlanGrid, num_elements: tuple[Array, ...], by_matrix: tuple[Numbers, ...], frozen: tuple[Array, ...] = ()
) -> StateBytes:
    """Bytes of common elements, and of routed experts' if any; `by_matrix` has the number of each that are updated by
    matrix. Shards have no padding. `frozen` bytes, of the same two, are values alone."""
    none = 0.0 * num_elements[0]
    total = StateBytes(none, none, none, host=none)
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
        total += state_bytes(num, element, grid.zero, are_values_hosted, is_one_memory=False)
    for num_bytes, kind in zip(frozen, SHARDS.values(), strict=False):
        shard = num_bytes * np.where(grid.zero == 3, 1 / layout(grid, kind).size, 1.0)
        is_hosted = (grid.zero == 3) * grid.offload_parameters
        total += StateBytes(shard * (1 - is_hosted), none, none, host=shard * is_hosted)
    return total


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
    assert run.job is not None, "a run of this runtime is of a job"
    if recipe := run.job.precision.float8_facts:  # weights are kept in fp8
        resident_routed = routed * (1 - is_borrowed)  # they stay in memory
        num_bytes = num_bytes + recipe.num_weight_casts * (
            resident_routed + np.where(grid.zero < 3, num_borrowed - tables, stage)
        )
    if COMPRESSIONS[grid.compress].kept_elements is not None:
        num_bytes = num_bytes + FLOAT32_BYTES * (common + routed * shares_routed) * (num_replicas(grid) > 1)
    return num_bytes
