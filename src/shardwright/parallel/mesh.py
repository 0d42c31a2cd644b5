"""The mesh of process groups: this rank's line along each axis of spec/mesh.py."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.parallel.collectives import Axis
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.turns import Turns
from shardwright.parallel.watch import Watch
from shardwright.schedule.placement import Placement, in_line
from shardwright.spec.mesh import AXES, MeshShape


@dataclass(frozen=True)
class Mesh:
    """This rank's axes.

    `forward` and `backward` carry pipeline messages. With NCCL they are communicators of their own, so that a
    receive posted early for the one direction never stands before a message of the other. `ends` joins the first
    and the last stage, which share a tied embedding. `copies` joins, where a pipeline holds each stage twice, the
    replicas of all copies: one axis for the stages of the first half and one for those of the second, for the two
    ranks that hold a pair of stages finish them in opposite order. `shards` are the ranks of dp that share one set of
    ZeRO's shards, and `shard_copies` those that hold the same shard: all of dp and this rank alone, unless hybrid.
    """

    rank: int
    shape: MeshShape
    world: Axis
    pp: Axis
    dp: Axis
    tp: Axis
    forward: Axis
    backward: Axis
    ends: Axis
    copies: tuple[Axis, Axis] | None
    shards: Axis
    shard_copies: Axis
    device: torch.device
    ledger: Ledger
    turns: Turns
    watch: Watch | None

    def replicas(self, stage: int, num_stages: int) -> Axis:
        """The ranks that hold the same part of a stage."""
        return self.dp if self.copies is None else self.copies[stage >= num_stages // 2]

    def to_host(self, value: torch.Tensor) -> float:
        """The number in a tensor. On CUDA this is where the host waits for the device, and so for other ranks."""
        if self.watch is None or self.device.type == "cpu":
            return float(value)
        with self.watch.waiting(
            "the device's work, a collective in it", tuple(r for r in self.world.ranks if r != self.rank)
        ):
            return float(value)


def make_mesh(
    shape: MeshShape, rank: int, device: torch.device, timeout_s: float, watch: Watch | None = None,
    tied: bool = False, placement: Placement | None = None, side_by_side: bool = False, zero_ranks: int = 0,
) -> Mesh:  # fmt: skip
    """Create the process groups of every axis. All ranks of an initialised default group must call this.

    `tied` asks for the group of the pipeline's two ends. `placement` says where they are, and how many copies of the
    stages there are; `side_by_side`, that a forward and a backward pass may run at once; `zero_ranks`, if it is not 0,
    that ZeRO shards over so many neighbours of dp, and copies over the others.
    """
    ledger, turns = Ledger(device), Turns()
    placement = placement or in_line(shape.sizes["pp"])
    # The watch speaks first; this bound only ends a rank whose watch could not.
    timeout = timedelta(seconds=2 * timeout_s + 10)

    def group_of(lines: list[list[int]]) -> dist.ProcessGroup | None:
        mine = None
        for ranks in lines:  # every rank takes part in the creation of every group, in the same order
            if len(ranks) > 1:
                made = dist.new_group(ranks, timeout=timeout)
                mine = made if rank in ranks else mine
        return mine

    def axis(name: str, lines: list[list[int]], twice: bool = False) -> Axis:
        mine = next((line for line in lines if rank in line), [rank])
        backward = group_of(lines) if twice else None
        return Axis(name, tuple(mine), mine.index(rank), group_of(lines), ledger, watch, backward, turns)

    pipelines, replicas = shape.lines("pp"), shape.lines("dp")
    pp = axis("pp", pipelines)
    dp = axis("dp", replicas)
    shards, shard_copies = dp, axis("dp", [])
    if 0 < zero_ranks < dp.size:
        inner = [line[i : i + zero_ranks] for line in replicas for i in range(0, dp.size, zero_ranks)]
        outer = [line[i::zero_ranks] for line in replicas for i in range(zero_ranks)]
        shards, shard_copies = axis("dp shards", inner), axis("dp copies", outer)
    own_directions = device.type == "cuda"  # Gloo tells messages apart by their tags
    first, last = placement.holders[0][0], placement.holders[0][-1]
    has_ends = tied and placement.num_copies == 1 and first != last
    mirrored = shape.mirrored() if placement.num_copies == 2 else []
    return Mesh(
        rank=rank,
        shape=shape,
        world=axis("world", shape.lines(*AXES)),
        pp=pp,
        dp=dp,
        tp=axis("tp", shape.lines("tp"), twice=side_by_side),
        forward=axis("pp", pipelines) if own_directions else pp,
        backward=axis("pp", pipelines) if own_directions else pp,
        ends=axis("ends", [[line[first], line[last]] for line in pipelines] if has_ends else []),
        copies=(axis("dp", mirrored), axis("dp", mirrored)) if mirrored else None,
        shards=shards,
        shard_copies=shard_copies,
        device=device,
        ledger=ledger,
        turns=turns,
        watch=watch,
    )
