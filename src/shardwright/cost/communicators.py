"""Bytes that NCCL keeps on a device for a rank's communicators, of many plans at once.

Each line of the mesh with more than one rank has a communicator (parallel/comm/process_groups.py), and each pair of
neighbouring stages has one for each direction. A communicator has channels, and a channel has connections: buffers of
10 MiB, one for each protocol, at the receiver and 2 MiB at the sender (NCCL 2.28, src/init.cc, computeBuffSizes;
src/transport/p2p.cc, p2pSendSetup and p2pRecvSetup). Compared with published numbers this gives 576 MiB for 544 and 688
(groups of 2 and of 4 A100, NVIDIA/nccl issue 964), and 2.6 GiB for 3.1 (an all-to-all of 8 H100, issue 1685).
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.job import JobSpec
from shardwright.config.units import GIB, MIB
from shardwright.cost.calibration import device_of
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.topology import Group
from shardwright.layers.arrays import Array, Numbers, stacked_rows
from shardwright.layers.memo import Memo
from shardwright.layers.query import PlanGrid, Run
from shardwright.sharding.groups import COPIES, CP, DP, EP, ETP, PP, REPLICAS, SHARDS, TP, WORLD, GroupKind

_CONTEXT_BYTES = 0.67 * GIB  # of a process after its first product: 685 MiB on an H200 (docs/gpu.md)
_LOST = 0.01  # share of a device's memory that the caching allocator loses between blocks
_ARRIVES, _LEAVES = 10 * MIB, 2 * MIB  # of one connection, at its receiver and at its sender
_NEIGHBOURS = 2  # of a rank in a channel, connected in both directions: along a ring, or up and down a tree
_NUM_DIRECTIONS = 2  # of messages between stages, each with communicators of its own
_EXCHANGE_CHANNELS = 32  # to each peer of direct messages, if all peers lie in one domain of fast links
_FAR_EXCHANGE_CHANNELS = 2  # to each peer of direct messages, if some peers lie outside
_SHARED_BYTES = 64 * MIB  # for all direct messages through the network in one direction
_MOST_FAR_CHANNELS, _LEAST_FAR_CHANNELS = 16, 4  # of communicators that cross the network
_CHANNELS_OF_PORT = 2


@dataclass(frozen=True)
class Communicators:
    """`num` equal communicators over a `group`. `exchanges` is the number of peers to which each rank sends messages
    directly, without a ring."""

    group: Group
    num: Numbers
    exchanges: Numbers = 0


def rooms_bytes(run: Run, memo: Memo) -> Array:
    """`room_bytes` of many plans, computed once for plans with equal communicators. Numbers of the run are arrays."""
    grid = run.grid

    def rooms(run: Run) -> Array:
        return stacked_rows([room_bytes(run)], len(run.grid.tp))

    by_plan: Array = memo.rows("room", run, (grid.cp_method, grid.dispatch, grid.is_vee), _columns, rooms)[0]
    return by_plan


def _columns(grid: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that determine its communicators. `grid` has arrays."""
    facts = grid.of_schedules(lambda facts: 4 * facts.num_copies + 2 * facts.has_ends_apart + facts.pairs)
    degrees = grid.tp, grid.cp, grid.dp, grid.pp, grid.ep, grid.expert_tp
    return *degrees, grid.order_number, (grid.zero > 0) * grid.zero_ranks, facts + 0 * grid.tp


def room_bytes(run: Run) -> Numbers:
    """Bytes of a device that a plan of this runtime may fill: those that the device's entry offers, or less if context,
    communicators and the allocator's losses need more."""
    device = device_of(run.device)
    reserved = _CONTEXT_BYTES + _LOST * device.memory_bytes + communicator_bytes(run)
    return np.maximum(0.0, np.minimum(device.room_bytes, device.offered_bytes - reserved))


def job_room_bytes(job: JobSpec) -> float:
    """Bytes of the device that a job may fill; those of the device's entry if the network between nodes is unknown."""
    try:
        return float(room_bytes(run_of(job)))
    except KeyError:
        return device_of(job.cluster.device).room_bytes


def communicator_bytes(run: Run) -> Numbers:
    """Bytes of all communicators of a rank in the middle of its pipeline; 0 if the device's entry has no number of
    channels."""
    channels = device_of(run.device).communicator_channels
    if not channels:
        return 0.0 * run.grid.world
    line_bytes = sum(_bytes_each(communicator, channels) * communicator.num for communicator in communicators(run))
    return line_bytes + _bytes_of_messages(run)


def process_bytes(run: Run, usual_bytes: float) -> float:
    """Bytes of a device that the driver shows of a process of one plan beside those of its allocator: the context, and
    NCCL's communicators; `usual_bytes` if the device's entry has no number of channels."""
    buffers_bytes = float(communicator_bytes(run))
    return _CONTEXT_BYTES + buffers_bytes if buffers_bytes else usual_bytes


def communicators(run: Run) -> list[Communicators]:
    """The communicators of a rank over lines of the mesh. Equal lines share one communicator."""
    grid, groups = run.grid, Groups(run)
    num_threads = grid.of_schedules(lambda facts: 1 + facts.pairs)  # passes that run at the same time
    by_kind = {
        WORLD: 1,
        DP: 1,
        CP: num_threads,
        TP: num_threads,
        REPLICAS[False]: grid.cp > 1,
        PP: 1,
        EP: num_threads,
        ETP: num_threads * (grid.expert_tp != grid.tp),
    }
    is_mirrored, has_experts = grid.num_copies > 1, bool(run.shape.experts)
    is_folded = has_experts & ((grid.expert_tp != grid.tp) | (grid.ep > 1))  # else experts share the lines of the rest
    for is_expert in (False, True):
        replicas, shards = groups.along(REPLICAS[is_expert]), groups.along(SHARDS[is_expert])
        is_hybrid = shards.size < replicas.size * grid.num_copies
        is_apart = is_folded if is_expert else is_hybrid | is_mirrored
        by_kind[SHARDS[is_expert]] = is_apart * (1 + is_mirrored)
        by_kind[COPIES[is_expert]] = is_hybrid & (is_folded | (not is_expert))
    lines = [_alike(run, groups, kind, num) for kind, num in by_kind.items()]
    return [*lines, *_of_nodes(run, groups, num_threads), *_of_ends(run, groups)]


def _alike(run: Run, groups: Groups, kind: GroupKind, num: Numbers) -> Communicators:
    group = groups.along(kind)
    exchanges: Numbers = 0
    if kind == EP and run.grid.dispatch == "node-aware":  # communicators of nodes do the exchange
        exchanges = (group.size - 1) * (group.inside >= group.size)
    elif kind == EP or (kind == CP and run.grid.trades_heads):
        exchanges = group.size - 1
    elif kind == CP and CONTEXT_METHODS[run.grid.cp_method].exchange == "ring":  # keys and values pass along it
        exchanges = np.minimum(1, group.size - 1)
    return Communicators(group, num * (group.size > 1), exchanges)


def _of_nodes(run: Run, groups: Groups, num_threads: Numbers) -> list[Communicators]:
    """Communicators between and within nodes, for node-aware dispatch of tokens to experts."""
    ep_group = groups.along(EP)
    if run.grid.dispatch != "node-aware":
        return []
    num_nodes = ep_group.domains
    num_alike = num_threads * ((ep_group.size > 1) & (num_nodes > 1))
    between, inside = Group(num_nodes, 1 + 0 * num_nodes), Group(ep_group.inside, ep_group.inside)
    return [
        Communicators(group, num_alike * (group.size > 1), np.maximum(0, group.size - 1)) for group in (between, inside)
    ]


def _of_ends(run: Run, groups: Groups) -> list[Communicators]:
    """The communicator of the first and the last stage, if they share a table."""
    if run.job is None or not run.job.model.shares_table:
        return []
    pipeline = groups.along(PP)
    is_apart = (pipeline.size > 1) & (_num_ways(run.grid) == 1)
    return [Communicators(Group(2, np.where(pipeline.inside < pipeline.size, 1, 2)), 1 * is_apart)]


def _bytes_each(communicator: Communicators, channels: int) -> Numbers:
    """Bytes of one communicator: connections along its rings and trees, and for direct messages."""
    group = communicator.group
    is_near = group.inside >= group.size
    far = np.clip(_CHANNELS_OF_PORT * group.inside, _LEAST_FAR_CHANNELS, _MOST_FAR_CHANNELS)
    rings = np.where(is_near, channels, np.minimum(channels, far)) * _NEIGHBOURS * (_ARRIVES + _LEAVES)
    near = np.minimum(communicator.exchanges, group.inside - 1) * (_ARRIVES + _LEAVES)
    far_bytes = _FAR_EXCHANGE_CHANNELS * near + 2 * _SHARED_BYTES
    exchange = np.where(is_near, _EXCHANGE_CHANNELS * near, far_bytes) * (communicator.exchanges > 0)
    return rings + exchange


def _bytes_of_messages(run: Run) -> Numbers:
    """Bytes of the communicators with two neighbouring stages."""
    pipeline = Groups(run).along(PP)
    is_near = pipeline.inside >= pipeline.size
    arrives = np.where(is_near, _EXCHANGE_CHANNELS * _ARRIVES, _SHARED_BYTES)
    leaves = np.where(is_near, _EXCHANGE_CHANNELS * _LEAVES, _SHARED_BYTES)
    return _NUM_DIRECTIONS * _num_ways(run.grid) * (arrives + leaves) * (pipeline.size > 1)


def _num_ways(grid: PlanGrid) -> Numbers:
    """Paths of messages of one direction through a rank: 2 if the stages go down the pipeline and back up."""
    return 2 if grid.is_vee else grid.of_schedules(lambda facts: 1 if facts.has_ends_apart else 2)
