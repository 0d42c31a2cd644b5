"""Bytes of memory on each pipeline rank: state, activations by schedule, and the needs of loss, backward and libraries.

State is ZeRO's table (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1) with the software's bytes of a gradient.
Activations are the bytes that one microbatch keeps (layers/chains.py) times the microbatches in flight. `working` has
the further bytes that the loss or the backward of a layer needs at the peak, and those that libraries hold through the
step. `total` has the bytes that the allocator has given out at the peak; a process needs `overhead` more: the CUDA
context, communication buffers, bytes lost between blocks, and what the allocator holds beside
(memory/allocator_slack.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.software import SoftwareSpec
from shardwright.config.units import MIB
from shardwright.cost.calibration import Constants, device_constant, device_of, software_under
from shardwright.cost.communicators import rooms_bytes
from shardwright.cost.pipeline_bubble import alive_microbatches, waiting_losses
from shardwright.cost.update_time import held_by_matrix, scratch_bytes
from shardwright.layers.arrays import Array, Numbers, entries, only, picked
from shardwright.layers.memo import Memo
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import PipelineRanks, all_ranks
from shardwright.memory.allocator_slack import (
    cut_blocks,
    pending_blocks,
    update_bytes,
)
from shardwright.memory.gathered_weights import gathered_bytes
from shardwright.memory.microbatch_bytes import MicrobatchBytes, StageLayers
from shardwright.memory.own_memory import held_activations
from shardwright.memory.own_state import held_buffers, held_state
from shardwright.memory.software_state import (
    copied_for_update,
    float8_bytes,
    fresh_gradients,
    frozen_bytes,
    held_by_software,
    new_at_update,
    table_elements,
)

_WORKSPACE = 32 * MIB  # for cuBLAS on Hopper and later, as NVIDIA advises


@dataclass(frozen=True)
class Memory:
    """Bytes on one pipeline rank. All are on the device but `host`."""

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    buffers: Numbers
    working: Numbers
    overhead: Numbers
    host: Numbers
    slack: Numbers  # what the allocator holds beside `total` where there is room, and gives back; not in `process`

    @property
    def total(self) -> Numbers:
        """The bytes that the allocator has given out."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.working

    @property
    def process(self) -> Numbers:
        """The bytes that the device must have."""
        return self.total + self.overhead

    def reserved(self, room_bytes: float) -> Numbers:
        """The bytes that the allocator has of the `room_bytes` of a device that it can have."""
        return np.maximum(self.total, np.minimum(self.total + self.slack, room_bytes))

    def on_device(self) -> dict[str, Numbers]:
        """The bytes of `process` by kind."""
        return {name: value for name, value in asdict(self).items() if name not in ("slack", "host")}

    def as_dict(self) -> dict[str, Numbers]:
        """Bytes by kind that a process needs, with the total."""
        return {name: value for name, value in asdict(self).items() if name != "slack"} | {"total": self.total}


def peak_memory(run: Run, constants: Constants, memo: Memo | None = None) -> Memory:
    """Memory of the pipeline rank that needs most of its device, with `host` of the rank that offloads most; in arrays
    if the plan's numbers are arrays.

    `memo` keeps earlier results. KeyError names what is unknown.
    """
    grid = run.grid.as_arrays()
    memo = memo or Memo()
    memory = _on_ranks(
        replace(run, grid=grid), constants, memo.ranks(run.shape, grid), memo, sizes=memo.held(run.shape, grid)
    )
    most = np.argmax(memory.process, axis=0)
    host_bytes = np.broadcast_to(memory.host, memory.process.shape).max(axis=0)
    memory = replace(picked(memory, (most, np.arange(len(most)))), host=host_bytes)
    return only(memory) if run.grid.is_single else memory


def rank_memory(run: Run, constants: Constants, memo: Memo | None = None) -> list[Memory]:
    """Memory of each pipeline rank of one plan. `memo` keeps earlier results.

    KeyError names what is unknown.
    """
    grid = run.grid.as_arrays()
    ranks = all_ranks(run.shape, grid)
    sizes = ranks.parameters(run.shape, grid)
    memory = _on_ranks(replace(run, grid=grid), constants, ranks, memo or Memo(), sizes=sizes)
    return entries(picked(memory, (slice(None), 0)))


def _on_ranks(run: Run, constants: Constants, ranks: PipelineRanks, memo: Memo, sizes: tuple[Array, Array]) -> Memory:
    """Memory of every rank, in arrays of shape (ranks, plans). `sizes`: number of (common, routed) parameters."""
    software, grid, shape = software_under(run), run.grid, run.shape
    if is_counted(run):
        return _of_this_runtime(run, constants, ranks, memo, sizes)
    if software.whole_embedding:
        common, routed = sizes
        sizes = common + shape.table_elements * ranks.embedding * (1 - 1 / grid.tp), routed
    microbatch = MicrobatchBytes.of(run, ranks, memo)
    layers = StageLayers.of(run, ranks, microbatch)
    # Without a pipeline other software has no schedule.
    alive = np.where(grid.pp == 1, 1.0, alive_microbatches(grid, ranks.rank))
    num_losses = np.where(grid.pp == 1, 1.0, waiting_losses(grid))
    activations = (layers.kept - layers.offloaded) * alive + ranks.head * microbatch.head * num_losses
    layer_bytes, loss_bytes = layers.in_turn, ranks.head * microbatch.loss
    working = np.maximum(layer_bytes, loss_bytes) + _libraries(software, ranks, microbatch.placeholders)
    num_sharded = sizes[0] if software.zero.whole_experts else sum(sizes)
    held = gathered_bytes(run, software, num_sharded, np.maximum(1, layers.num_layers))
    buffers = np.maximum(layer_bytes + held[0], loss_bytes + held[1]) - np.maximum(layer_bytes, loss_bytes)
    trained = ranks.trained(shape, grid) if shape.is_adapted else sizes
    by_matrix = held_by_matrix(run, ranks, trained)
    elements = trained if shape.experts else trained[:1]
    state = held_by_software(grid, software, elements, by_matrix)
    narrow_bytes = float8_bytes(run, software, sum(trained) - table_elements(run, ranks) * (not shape.is_adapted))
    gradients = state.gradients
    step_bytes = activations + working + buffers
    copied_bytes = copied_for_update(grid, software, elements)
    working = working + np.maximum(0.0, copied_bytes - step_bytes)
    if software.lone_loss:
        in_backward = np.maximum(layer_bytes + buffers, copied_bytes)
        gradients = fresh_gradients(grid, state.gradients, step_bytes, in_backward)
    cut_bytes = cut_blocks(software, grid, layer_bytes, loss_bytes)
    lost_bytes = np.maximum(memory_lost(run, constants) * step_bytes, cut_bytes)
    idle_bytes = np.maximum(lost_bytes, _memory_idle(run, constants) * step_bytes)
    held_share = device_constant(constants, device_of(run.device), "stream_blocks")
    pending = pending_blocks(software, grid, alive, layers.blocks, share=held_share)
    largest = np.maximum(layers.largest, ranks.head * microbatch.logits)
    for_update = update_bytes(software, grid, elements, largest)
    return Memory(
        state.parameters + narrow_bytes + frozen_bytes(run, ranks),
        gradients,
        state.optimizer,
        activations,
        buffers=buffers,
        working=working,
        overhead=device_constant(constants, device_of(run.device), "context_bytes")
        + np.maximum(lost_bytes + np.minimum(layers.kept, pending.most), for_update.needed - step_bytes),
        host=state.host + layers.offloaded * alive,
        slack=np.maximum(
            idle_bytes, lost_bytes + pending.expected + new_at_update(software, grid, for_update, state.optimizer)
        ),
    )


def is_counted(run: Run) -> bool:
    """True if a run is of this runtime and of a job; then its memory is counted as in the account."""
    return software_under(run).is_own and run.job is not None


def memory_lost(run: Run, constants: Constants) -> float:
    """Share of activations, buffers and working memory that is lost between blocks; 0 for this runtime, since the
    headroom of its devices includes it."""
    return 0.0 if is_counted(run) else device_constant(constants, device_of(run.device), "memory_lost")


def _memory_idle(run: Run, constants: Constants) -> Numbers:
    """Share of activations, buffers and working memory that the allocator has beside what it gave out, while there is
    room, for whatever reason; 0 if its segments grow, and where blocks of the update are counted one by one
    (`gathers_copies`; `update_blocks`, but for the groups of ZeRO-3, for which there may be room)."""
    software = software_under(run)
    if software.expandable_segments or software.gathers_copies:
        return 0.0
    idle = device_constant(constants, device_of(run.device), "memory_idle")
    return idle * (run.grid.zero == 3) if software.update_blocks else idle


def _of_this_runtime(
    run: Run, constants: Constants, ranks: PipelineRanks, memo: Memo, sizes: tuple[Array, Array]
) -> Memory:
    """Memory of every rank of this runtime, in arrays; `overhead` is the part of the device that it can't fill."""
    device, grid = device_of(run.device), run.grid
    held = held_activations(run, ranks, memo)
    trained, stored_share, frozen = ranks.trained(run.shape, grid), 1.0, tuple[Array, ...]()
    if run.shape.is_adapted:
        of_layers, of_experts, of_others = ranks.frozen_bytes(run.shape, grid)
        frozen = of_layers + of_others, of_experts
        in_numbers = grid.element_bytes * (sizes[0] + sizes[1]) - of_others
        stored_share = (of_layers + of_experts) / np.maximum(1.0, in_numbers)
    by_matrix = held_by_matrix(run, ranks, trained)
    elements = trained if run.shape.experts else trained[:1]
    state = held_state(grid, elements, by_matrix, frozen)
    trained_share = (trained[0] + trained[1]) / np.maximum(1.0, sizes[0] + sizes[1])
    borrowed = held_buffers(run, ranks, *sizes, trained_share=trained_share, stored_share=stored_share)
    return Memory(
        state.parameters,
        state.gradients,
        state.optimizer,
        held.activations,
        buffers=held.messages + np.maximum(borrowed, scratch_bytes(run, ranks)),
        working=held.working,
        overhead=device.offered_bytes - rooms_bytes(run, memo) + 0.0 * held.working,
        host=state.host + held.offloaded,
        slack=0.0 * held.working,
    )


def _libraries(software: SoftwareSpec, ranks: PipelineRanks, placeholders: Sequence[Array]) -> Numbers:
    """Bytes that libraries hold through the whole step: placeholders of weight gradients and workspaces. They depend on
    the kinds of layers that a rank has."""
    dense, experts = (
        np.asarray(
            sum(
                count for (kind, _), count in zip(ranks.kinds, ranks.layers, strict=True) if routed == has_experts(kind)
            )
        )
        > 0
        for routed in (False, True)
    )
    of_dense, of_experts, of_both = placeholders
    placeholder_bytes = np.where(dense & experts, of_both, np.where(experts, of_experts, dense * of_dense))
    always, experts_more = software.workspaces
    return placeholder_bytes + _WORKSPACE * (always + experts_more * experts)
