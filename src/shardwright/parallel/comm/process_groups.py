"""The mesh of process groups: this rank's line along each axis of sharding/groups.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.parallel.comm.collectives import Axis, NodeAxes
from shardwright.parallel.comm.compute_turns import IssueTurns, Turns
from shardwright.parallel.comm.hang_watch import Watch
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.transport import GroupTransport, Transport
from shardwright.parallel.device_streams import DeviceStreams, host_reading, streams_of
from shardwright.sharding import groups
from shardwright.sharding.groups import AxisGroups, GroupKind, axis_groups
from shardwright.sharding.mesh import MeshShape


@dataclass(frozen=True)
class ReplicaAxes:
    """The ranks that hold the same part of a stage, or of its experts, and sum its gradients.

    `shards` are the ranks that share one set of ZeRO's shards, for the stages of each half of the pipeline; `copies`
    are the ranks that hold the same shard. Unless sharding is hybrid, `shards` are all replicas and `copies` is this
    rank alone. Both halves are one axis, unless a pipeline holds each stage twice: then the two ranks that hold a pair
    of stages finish them in opposite order.
    """

    shards: tuple[Axis, Axis]
    copies: Axis

    def sharing(self, stage: int, num_stages: int) -> tuple[Axis, Axis]:
        """The axis whose ranks share the state of a stage, and the axis whose ranks hold copies of this rank's
        share."""
        return self.shards[stage >= num_stages // 2], self.copies


@dataclass(frozen=True)
class Mesh:
    """This rank's axes.

    `dp_cp` joins all ranks with the same part of the model and different tokens. `forward` and `backward` carry
    pipeline messages. With NCCL each has a communicator of its own, so that a receive posted early for one direction
    never delays a message of the other. `ends` joins the first and the last stage, which share a tied embedding.
    `replicas` sum gradients, and `expert_replicas` sum those of experts; for experts the ranks of a stage are folded
    into `ep` and `expert_tp` (sharding/mesh.py). `ep` knows its nodes if dispatch is node-aware.
    """

    rank: int
    shape: MeshShape
    world: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis
    ep: Axis
    expert_tp: Axis
    forward: Axis
    backward: Axis
    ends: Axis
    replicas: ReplicaAxes
    expert_replicas: ReplicaAxes
    device: torch.device
    ledger: Ledger
    turns: Turns
    watch: Watch | None

    @property
    def is_first_replica(self) -> bool:
        """True if this rank's pipeline is the first replica, and this rank the first of its cp and tp lines."""
        return self.dp.index == self.cp.index == self.tp.index == 0

    @property
    def streams(self) -> DeviceStreams | None:
        """The streams of this rank's device; None if it has none."""
        return self.ledger.streams

    def to_host(self, value: torch.Tensor) -> float:
        """The number in a tensor; 1 if tensors have no values."""
        return self.numbers_or_ones(value.reshape(1))[0]

    def numbers_or_ones(self, values: torch.Tensor) -> list[float]:
        """The numbers in a tensor [n], each 1 if tensors have no values."""
        return [float(value) for value in self.on_host_or_ones(values).tolist()]

    def on_host_or_ones(self, values: torch.Tensor) -> torch.Tensor:
        """The values in host memory, for which the host waits, each 1 if tensors have no values."""
        with host_reading(self.streams, values):
            return torch.ones(values.shape, dtype=values.dtype) if values.is_meta else values.cpu()

    def numbers(self, values: torch.Tensor) -> list[float]:
        """The numbers in a tensor [n]. On CUDA this is where the host waits for the device, and so for other ranks."""
        return [float(value) for value in self.on_host(values).tolist()]

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """The values in host memory, for which the host waits, and is watched meanwhile."""
        with host_reading(self.streams, values):
            return values.cpu()


# Makes the communicator of this rank's line, which is one of the given lines; None if the rank is alone on it.
Connect = Callable[[list[list[int]]], Transport | None]


@dataclass(frozen=True)
class MeshNeeds:
    """The facts of a job that decide its process groups: the plan, the ends of pipelines that share a tied table,
    whether a forward and a backward pass may run at once, and how many neighbouring ranks share a node (0: unknown)."""

    plan: PlanSpec
    ends: AxisGroups | None = None
    side_by_side: bool = False
    ranks_per_node: int = 0


@dataclass(frozen=True)
class StandIns:
    """A dry run's replacements for other ranks, for the `kind` of its device and for the device's streams."""

    connect: Connect | None = None
    kind: str = ""
    streams: DeviceStreams | None = None


def make_mesh(
    needs: MeshNeeds,
    rank: int,
    device: torch.device,
    timeout_s: float,
    watch: Watch | None = None,
    stand_ins: StandIns | None = None,
) -> Mesh:
    """Create the process groups of every axis. All ranks of an initialised default group must call this."""
    # The watch reports first; this longer bound only ends a rank whose watch could not.
    timeout = timedelta(seconds=2 * timeout_s + 10)
    stand_ins = stand_ins or StandIns()
    connect_world = stand_ins.connect or _group_of_all
    kind = stand_ins.kind or device.type
    streams = stand_ins.streams or streams_of(device, partial(_watched_wait, needs.plan.world, rank, watch))
    ledger = Ledger(device, rank, needs.ranks_per_node, kind=kind, streams=streams)
    turns = Turns() if kind == "cpu" else IssueTurns()
    maker = _AxisMaker(needs, rank, ledger, watch, turns, stand_ins.connect or partial(_new_group, rank, timeout))
    pp = maker.along(groups.PP)
    own_directions = kind == "cuda"  # Gloo tells messages apart by their tags
    return Mesh(
        rank=rank,
        shape=MeshShape.of(needs.plan),
        world=replace(maker, connect=connect_world).along(groups.WORLD),
        pp=pp,
        dp=maker.along(groups.DP),
        cp=maker.along(groups.CP, needs.side_by_side),
        tp=maker.along(groups.TP, needs.side_by_side),
        dp_cp=maker.along(groups.REPLICAS[False]),
        ep=maker.expert_axis(),
        expert_tp=maker.along(groups.ETP, needs.side_by_side),
        forward=maker.along(groups.PP, number=1) if own_directions else pp,
        backward=maker.along(groups.PP, number=2) if own_directions else pp,
        ends=maker.axis(needs.ends) if needs.ends else pp.alone("ends"),
        replicas=maker.replicas(is_expert=False),
        expert_replicas=maker.replicas(is_expert=True),
        device=device,
        ledger=ledger,
        turns=turns,
        watch=watch,
    )


@dataclass(frozen=True)
class _AxisMaker:
    """Makes the axes of one rank, each once. All ranks must make the same axes in the same order."""

    needs: MeshNeeds
    rank: int
    ledger: Ledger
    watch: Watch | None
    turns: Turns
    connect: Connect
    axes: dict[tuple[AxisGroups, int], Axis] = field(default_factory=dict)  # that were made, with their numbers

    def along(self, kind: GroupKind, side_by_side: bool = False, number: int = 0) -> Axis:
        """The axis of this rank's line in a kind of groups."""
        return self.axis(axis_groups(self.needs.plan, kind), side_by_side, number)

    def axis(self, line_groups: AxisGroups, side_by_side: bool = False, number: int = 0) -> Axis:
        """The axis of this rank's line in some groups. It has two communicators if a forward and a backward pass use it
        `side_by_side`, on threads of their own. Each `number` of the same groups has communicators of its own."""
        if (line_groups, number) not in self.axes:
            lines = line_groups.lines()
            ranks = next((line for line in lines if self.rank in line), [self.rank])
            backward = self.connect(lines) if side_by_side else None
            self.axes[line_groups, number] = Axis(
                line_groups.axis,
                tuple(ranks),
                ranks.index(self.rank),
                self.connect(lines),
                self.ledger,
                self.watch,
                backward,
                self.turns,
            )
        return self.axes[line_groups, number]

    def replicas(self, is_expert: bool) -> ReplicaAxes:
        """The axes of the ranks that sum gradients with this rank."""
        shards = axis_groups(self.needs.plan, groups.SHARDS[is_expert])
        second_half = self.axis(shards, number=int(shards.is_mirrored))
        return ReplicaAxes((self.axis(shards), second_half), self.along(groups.COPIES[is_expert]))

    def expert_axis(self) -> Axis:
        """The axis whose ranks hold different experts, with its nodes if dispatch is node-aware."""
        plan, side_by_side = self.needs.plan, self.needs.side_by_side
        ep = self.along(groups.EP, side_by_side)
        ranks_in_node = ep_ranks_of_node(plan, self.needs.ranks_per_node) if plan.dispatch == "node-aware" else 0
        if ranks_in_node in (0, plan.ep):
            return ep
        inside, between = axis_groups(plan, groups.EP).split(ranks_in_node)
        return replace(ep, by_node=NodeAxes(self.axis(between, side_by_side, 1), self.axis(inside, side_by_side, 1)))


def _watched_wait(world: int, rank: int, watch: Watch | None) -> AbstractContextManager[None]:
    """A block in which the host waits for the device, and so for any other rank."""
    if watch is None or world == 1:
        return nullcontext()
    return watch.waiting(say("the device's work, a collective in it"), tuple(r for r in range(world) if r != rank))


def _group_of_all(lines: list[list[int]]) -> Transport | None:
    """The default process group, of all ranks: a second group of all ranks would double the connections."""
    return GroupTransport(dist.group.WORLD) if dist.is_initialized() and dist.group.WORLD is not None else None


def _new_group(rank: int, timeout: timedelta, lines: list[list[int]]) -> Transport | None:
    """The process group of this rank's line. Every rank takes part in the creation of every group, in one order."""
    transport = None
    for ranks in lines:
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=timeout)
            downwards = dist.new_group(ranks, timeout=timeout) if dist.get_backend() == "gloo" else None
            transport = GroupTransport(group, downwards) if rank in ranks else transport
    return transport
