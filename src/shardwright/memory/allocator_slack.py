"""Bytes that torch's caching allocator holds beside those that it has given out.

Two causes are counted, each from facts that a description of the software states (config/software.py):

- Blocks in use by a collective's stream. A tensor that a collective reads is recorded on the collective's stream
  (torch's ProcessGroupNCCL, recordStream). Where the host frees it, the allocator takes the block back only once that
  stream has passed, and takes a new block for the next request. The host is ahead of its device by as many launches as
  the device's queue holds, so the blocks of all collectives in that many launches are out of use.
- Contiguous copies at the update. A gather of ZeRO-1 that makes a contiguous copy finds no room in the blocks of the
  step's activations if the copy is larger than the largest of them.

Before the allocator reports that memory ran out, it waits for the streams and returns free blocks to the device, but
no block of which a tensor was cut. So all that it holds counts in what is reserved, and in whether a plan fits only as
many of the first blocks as hold what a microbatch keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.chains import Chain
from shardwright.layers.operators import HALF
from shardwright.layers.query import PlanGrid
from shardwright.sharding.groups import SHARDS, layout

LAUNCH_QUEUE = 1024  # launches that CUDA queues for a device before a further one waits


@dataclass(frozen=True)
class StreamBlocks:
    """Bytes of the tensors of one layer that are recorded on the stream of tp's collectives and freed in the layer's
    own pass, in the forward and in the backward."""

    forward: Numbers
    backward: Numbers


def stream_blocks(chain: Chain) -> StreamBlocks:
    """The inputs of the sums over tp. A gather's input is kept for the backward, so no pass frees it."""
    forward, backward = (
        sum(exchange.size for exchange in exchanges if exchange.axis == "tp" and exchange.kind in _SUMS)
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
    """Bytes of blocks that a collective's stream has not passed: those expected when most are, and at most, if a host is
    ahead in each forward."""

    expected: Numbers
    most: Numbers


def pending_blocks(
    software: SoftwareSpec,
    grid: PlanGrid,
    alive: Numbers,
    layers: Sequence[tuple[Array, StreamBlocks]],
) -> PendingBlocks:
    """Blocks that a collective's stream has not passed, of the layers of a rank: a number of layers with the blocks of
    each. `alive`: microbatches in flight.

    Without a pipeline nothing makes the host wait: the queue holds the launches of a forward and, before them, of the
    backward of the microbatch before. With one, the host waits for each gradient from the next rank, so it is ahead in
    the forwards that fill the pipeline alone, where one follows another: of `alive` - 1 forwards all but the first.
    """
    in_forward, in_backward = software.queued
    if not in_forward:
        return PendingBlocks(0.0, 0.0)
    num_layers: Numbers = sum(count for count, _ in layers)
    per_layer = np.maximum(1, num_layers)
    forward = sum(count * blocks.forward for count, blocks in layers) / per_layer
    backward = sum(count * blocks.backward for count, blocks in layers) / per_layer
    most = LAUNCH_QUEUE / in_forward
    followed = np.where(grid.pp > 1, np.maximum(0, alive - 2), 1)
    room = np.maximum(0.0, LAUNCH_QUEUE - num_layers * in_forward)
    is_behind = (grid.pp == 1) & (grid.num_microbatches > 1)
    queued_backward = np.minimum(num_layers, room / in_backward) * is_behind
    expected = forward * np.minimum(num_layers * followed, most) + backward * queued_backward
    return PendingBlocks(expected, np.maximum(expected, forward * np.minimum(num_layers, most)))


def copy_bytes(software: SoftwareSpec, grid: PlanGrid, num_elements: Sequence[Array], largest: Numbers) -> Numbers:
    """Bytes of new blocks for the contiguous copies of updated parameters: one copy is a block of its own, the other a
    block for each rank that updates a share. `largest`: bytes of the largest block of activations."""
    total: Numbers = 0.0
    if not software.gathers_copies:
        return total
    for elements, kind in zip(num_elements, SHARDS.values(), strict=False):
        ranks = layout(grid, kind).size
        copy = HALF * elements
        new = copy * (copy > largest) + copy * (copy / ranks > largest)
        total = total + new * ((grid.zero > 0) & (grid.zero < 3) & (ranks > 1))
    return total
