"""Bytes that torch's caching allocator holds beside those that it has given out.

Three causes are counted, each from facts that a description of the software states (config/software.py):

- Blocks in use by a collective's stream. A tensor that a collective reads is recorded on the collective's stream
  (torch's ProcessGroupNCCL, recordStream). Where the host frees it, the allocator takes the block back only once that
  stream has passed, and takes a new block for the next request. The host is ahead of its device by as many launches as
  the device's queue holds, so the blocks of all collectives in that many launches are out of use.
- Contiguous copies at the update. A gather of ZeRO-1 that makes a contiguous copy finds no room in the blocks of the
  step's activations if the copy is larger than the largest of them. Nor do flat copies of gradients.
- Blocks of the loss of which gradients were cut: this counts in place of the share of blocks that is lost anyway.

Before the allocator reports that memory ran out, it waits for the streams and returns free blocks to the device, but
no block of which a tensor was cut. So all that it holds counts in what is reserved, and in whether a plan fits only
those of the third cause and as many of the first as hold what a microbatch keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.config.units import MIB
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.chains import Chain
from shardwright.layers.layer_tensors import HALF
from shardwright.layers.query import PlanGrid
from shardwright.sharding.groups import SHARDS, layout

LAUNCH_QUEUE = 1024  # launches that CUDA queues for a device before a further one waits


@dataclass(frozen=True)
class StreamBlocks:
    """Bytes of the tensors of one layer that are recorded on the stream of tp's collectives and freed in the layer's
    own pass, in the forward and in the backward."""

    forward: Numbers
    backward: Numbers


def stream_blocks(chain: Chain, software: SoftwareSpec) -> StreamBlocks:
    """The inputs of the sums over tp, and what a gather gives where that is a new tensor. A gather's input is kept for
    the backward, so no pass frees it."""
    kinds = (*_SUMS, "all_gather") if software.gathers_anew else _SUMS
    forward, backward = (
        sum(exchange.size for exchange in exchanges if exchange.axis == "tp" and exchange.kind in kinds)
        for exchanges in (
            [exchange for operator in chain for exchange in operator.forward],
            [exchange for operator in chain for exchange in operator.backward],
        )
    )
    return StreamBlocks(forward, backward)


_SUMS = ("all_reduce", "reduce_scatter")


def largest_block(chain: Chain) -> Numbers:
    """Bytes of the largest tensor that an operator of a layer gives."""
    largest: Numbers = 0.0
    for operator in chain:
        largest = np.maximum(largest, operator.given)
    return largest


@dataclass(frozen=True)
class PendingBlocks:
    """Bytes of blocks that a collective's stream has not passed: those expected when most are, and at most, if the host
    is ahead in each forward."""

    expected: Numbers
    most: Numbers


def pending_blocks(
    software: SoftwareSpec,
    grid: PlanGrid,
    alive: Numbers,
    layers: Sequence[tuple[Array, StreamBlocks]],
    *,
    share: float = 1.0,
) -> PendingBlocks:
    """Blocks that a collective's stream has not passed, of the layers of a rank: a number of layers with the blocks of
    each. `alive`: microbatches in flight. `share`: of such blocks, those that stay out of use.

    Without a pipeline nothing makes the host wait: the queue holds the launches of a forward and, before them, of the
    passes of microbatches before. With one, the host waits for each gradient from the next rank, so it is ahead in the
    forwards that fill the pipeline alone, where one follows another: of `alive` - 1 forwards all but the first; or, if
    it waits for its device at each message, in the forward of one stage.
    """
    if not software.queued[0]:
        return PendingBlocks(0.0, 0.0)
    num_layers = np.maximum(1, sum(count for count, _ in layers))
    forward = sum(count * blocks.forward for count, blocks in layers) / num_layers
    backward = sum(count * blocks.backward for count, blocks in layers) / num_layers
    most = LAUNCH_QUEUE / software.queued[0]
    in_step = _queued_in_step(software, num_layers, grid.num_microbatches)
    passes = 1 / grid.virtual if software.waits_at_messages else np.maximum(0, alive - 2)
    queued_forward = np.where(grid.pp > 1, np.minimum(num_layers * passes, most), in_step[0])
    expected = forward * queued_forward + backward * np.where(grid.pp > 1, 0.0, in_step[1])
    return PendingBlocks(share * expected, share * np.maximum(expected, forward * np.minimum(num_layers, most)))


def _queued_in_step(software: SoftwareSpec, num_layers: Array, num_microbatches: Numbers) -> tuple[Array, Array]:
    """Layers (forward, backward) in the queue at the end of a forward, if nothing makes the host wait: of this forward,
    of as many whole microbatches before as there is room for, and of the passes of one more, the latest first."""
    in_forward, in_backward = software.queued
    room = np.maximum(0.0, LAUNCH_QUEUE - num_layers * in_forward)
    launches = num_layers * (in_forward + in_backward)
    whole = np.minimum(num_microbatches - 1, room // launches)
    rest = np.where(num_microbatches - 1 > whole, room - whole * launches, 0.0)
    backward = np.minimum(num_layers, rest / in_backward)
    before = np.maximum(0.0, rest - num_layers * in_backward) / in_forward
    forward = np.minimum(num_layers, LAUNCH_QUEUE / in_forward)
    return forward + whole * num_layers + before, whole * num_layers + backward


def copy_bytes(grid: PlanGrid, num_elements: Sequence[Array], largest: Numbers) -> Numbers:
    """Bytes of new blocks for the contiguous copies of updated parameters: one copy is a block of its own, the other a
    block for each rank that updates a share. `largest`: bytes of the largest block of activations."""
    total: Numbers = 0.0
    for elements, kind in zip(num_elements, SHARDS.values(), strict=False):
        ranks = layout(grid, kind).size
        copy = HALF * elements
        new = _if_larger(copy, largest) + copy * (copy / ranks > largest)
        total = total + new * (_shares_state(grid) & (ranks > 1))
    return total


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes of new blocks for the reduction of gradients and the update: those that stand beside the gradients, and all
    that the allocator has afterwards."""

    needed: Numbers
    reserved: Numbers


def update_bytes(
    software: SoftwareSpec, grid: PlanGrid, num_elements: Sequence[Array], largest: Numbers
) -> UpdateBytes:
    """Blocks for the reduction and the update under ZeRO. `largest`: bytes of the largest block of activations, which
    has room for copies that are not larger.

    Copies of parameters and of gradients stand beside gradients; under ZeRO-1 and 2 flat copies of a rank's share come
    after them, under ZeRO-3 those of a group of it stand beside them, too.
    """
    needed: Numbers = copy_bytes(grid, num_elements, largest) if software.gathers_copies else 0.0
    flat: Numbers = 0.0
    if (blocks := software.update_blocks) is not None:
        is_sharded = _shares_state(grid)
        needed = needed + is_sharded * blocks.bucket_mib * MIB
        for elements, kind in zip(num_elements, SHARDS.values(), strict=False):
            needed = needed + is_sharded * _if_larger(blocks.gradient_bytes * elements, largest)
            share = elements / layout(grid, kind).size
            flat = flat + sum(is_sharded * _if_larger(num_bytes * share, largest) for num_bytes in blocks.state_bytes)
            group = np.minimum(share, blocks.group_elements) * (grid.zero == 3)
            needed = needed + sum(_if_larger(num_bytes * group, largest) for num_bytes in blocks.state_bytes)
    return UpdateBytes(needed, needed + flat)


def _shares_state(grid: PlanGrid) -> Numbers:
    """True where ranks share the optimizer state, and each holds all parameters: ZeRO-1 and 2."""
    return (grid.zero > 0) & (grid.zero < 3)


def _if_larger(copy: Numbers, largest: Numbers) -> Numbers:
    return copy * (copy > largest)


def cut_blocks(software: SoftwareSpec, grid: PlanGrid, layer_bytes: Numbers, loss_bytes: Numbers) -> Numbers:
    """Bytes of the blocks of a loss that the next one can't use, where gradients are new tensors in each step.

    The first backward of a step makes its gradients, and all that its layers need, in blocks that the loss gave back.
    The gradients stay, so those blocks are in parts. The next loss needs new ones, beside what the backward of a layer
    needs: `loss_bytes` and `layer_bytes` add up, where else the larger of them counts.
    """
    is_cut = software.fresh_gradients & (np.asarray(grid.num_microbatches) > 1)
    return is_cut * np.minimum(layer_bytes, loss_bytes)
