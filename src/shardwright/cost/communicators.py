"""Bytes that NCCL keeps on a device for a rank's communicators, of many plans at once.

Each line of the mesh on which a rank is not alone has a communicator (parallel/comm/process_groups.py), and each pair
of neighbouring stages one a direction. A communicator has channels, and a channel connections: a buffer for each
protocol where messages arrive, 10 MiB together, and 2 MiB where they leave (NCCL 2.28, src/init.cc, computeBuffSizes;
src/transport/p2p.cc, p2pSendSetup and p2pRecvSetup). Beside what was published this gives 576 MiB for 544 and 688
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
from shardwright.sharding.groups import COPIES, CP, DP, EP, ETP, PP, REPLICAS, SHARDS, TP, WORLD, GroupKind
from shardwright.workload.arrays import Numbers
from shardwright.workload.query import PlanGrid, Run

_CONTEXT_BYTES = 0.67 * GIB  # of a process after its first product: 685 MiB on an H200 (docs/gpu.md)
_LOST = 0.01  # share of a device's memory that the caching allocator loses between blocks
_ARRIVES, _LEAVES = 10 * MIB, 2 * MIB  # of one connection
_NEIGHBOURS = 2  # to whom a channel has connections both ways: along a ring, or up and down a tree
_NUM_DIRECTIONS = 2  # of messages between stages, each with communicators of its own
_EXCHANGE_CHANNELS = 32  # to each rank that messages go to without a ring, where all lie in one domain of fast links
_FAR_EXCHANGE_CHANNELS = 2  # the same where some do not
_SHARED_BYTES = 64 * MIB  # of all messages without a ring that go one way through the network
_MOST_FAR_CHANNELS, _LEAST_FAR_CHANNELS = 16, 4  # of communicators that cross the network
_CHANNELS_OF_PORT = 2


@dataclass(frozen=True)
class Communicators:
    """Communicators that are alike: `num` of them over a `group`. `exchanges` are the ranks that each rank sends
    messages to without a ring."""

    group: Group
    num: Numbers
    exchanges: Numbers = 0


def room_bytes(run: Run) -> Numbers:
    """Bytes of a device that a plan of this runtime may fill: what its entry leaves to plans, or less where context,
    communicators and the allocator's loss need more."""
    device = device_of(run.device)
    taken = _CONTEXT_BYTES + _LOST * device.memory_bytes + communicator_bytes(run)
    return np.maximum(0.0, np.minimum(device.room_bytes, device.offered_bytes - taken))


def job_room_bytes(job: JobSpec) -> float:
    """Bytes of the device that a job may fill; what its entry leaves, where the network between nodes is not known."""
    try:
        return float(room_bytes(run_of(job)))
    except KeyError:
        return device_of(job.cluster.device).room_bytes


def communicator_bytes(run: Run) -> Numbers:
    """Bytes of all communicators of a rank between two others of its pipeline; 0 where the device's entry does not know
    its channels."""
    channels = device_of(run.device).communicator_channels
    if not channels:
        return 0.0 * run.grid.world
    lines = sum(_bytes_each(alike, channels) * alike.num for alike in communicators(run))
    return lines + _bytes_of_messages(run)


def communicators(run: Run) -> list[Communicators]:
    """The communicators of a rank over lines of the mesh. A line that is the same as another's has the other's."""
    grid, groups = run.grid, Groups(run)
    num_threads = grid.of_schedules(lambda facts: 1 + facts.pairs)  # passes that run side by side
    by_kind = {
        WORLD: 1, DP: 1, CP: num_threads, TP: num_threads, REPLICAS[False]: grid.cp > 1, PP: 1,
        EP: num_threads, ETP: num_threads * (grid.expert_tp != grid.tp),
    }  # fmt: skip
    is_mirrored, has_experts = grid.num_copies > 1, bool(run.shape.experts)
    is_folded = has_experts & ((grid.expert_tp != grid.tp) | (grid.ep > 1))  # else experts have the others' lines
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
    if kind == EP and run.grid.dispatch == "node-aware":  # the nodes' communicators exchange
        exchanges = (group.size - 1) * (group.inside >= group.size)
    elif kind == EP or (kind == CP and run.grid.trades_heads):
        exchanges = group.size - 1
    elif kind == CP and CONTEXT_METHODS[run.grid.cp_method].exchange == "ring":  # keys and values go round
        exchanges = np.minimum(1, group.size - 1)
    return Communicators(group, num * (group.size > 1), exchanges)


def _of_nodes(run: Run, groups: Groups, num_threads: Numbers) -> list[Communicators]:
    """Communicators between and within nodes, over which tokens go to experts in two steps."""
    whole = groups.along(EP)
    if run.grid.dispatch != "node-aware":
        return []
    num_nodes = whole.domains
    num = num_threads * ((whole.size > 1) & (num_nodes > 1))
    between, inside = Group(num_nodes, 1 + 0 * num_nodes), Group(whole.inside, whole.inside)
    return [Communicators(group, num * (group.size > 1), np.maximum(0, group.size - 1)) for group in (between, inside)]


def _of_ends(run: Run, groups: Groups) -> list[Communicators]:
    """The communicator of the first and the last stage, where they share a table."""
    if run.job is None or not run.job.model.shares_table:
        return []
    pipeline = groups.along(PP)
    is_apart = (pipeline.size > 1) & (_num_ways(run.grid) == 1)
    return [Communicators(Group(2, np.where(pipeline.inside < pipeline.size, 1, 2)), 1 * is_apart)]


def _bytes_each(alike: Communicators, channels: int) -> Numbers:
    """Bytes of one communicator: connections along its rings and trees, and those of an exchange."""
    group = alike.group
    is_near = group.inside >= group.size
    far = np.clip(_CHANNELS_OF_PORT * group.inside, _LEAST_FAR_CHANNELS, _MOST_FAR_CHANNELS)
    rings = np.where(is_near, channels, np.minimum(channels, far)) * _NEIGHBOURS * (_ARRIVES + _LEAVES)
    near = np.minimum(alike.exchanges, group.inside - 1) * (_ARRIVES + _LEAVES)
    far_bytes = _FAR_EXCHANGE_CHANNELS * near + 2 * _SHARED_BYTES
    exchange = np.where(is_near, _EXCHANGE_CHANNELS * near, far_bytes) * (alike.exchanges > 0)
    return rings + exchange


def _bytes_of_messages(run: Run) -> Numbers:
    """Bytes of the communicators of two neighbouring stages, one for each way that messages of a direction go."""
    pipeline = Groups(run).along(PP)
    is_near = pipeline.inside >= pipeline.size
    arrives = np.where(is_near, _EXCHANGE_CHANNELS * _ARRIVES, _SHARED_BYTES)
    leaves = np.where(is_near, _EXCHANGE_CHANNELS * _LEAVES, _SHARED_BYTES)
    return _NUM_DIRECTIONS * _num_ways(run.grid) * (arrives + leaves) * (pipeline.size > 1)


def _num_ways(grid: PlanGrid) -> Numbers:
    """Ways that messages of one direction pass a rank: 2 where stages lie down the pipeline and back up."""
    return 2 if grid.is_vee else grid.of_schedules(lambda facts: 1 if facts.has_ends_apart else 2)
