"""The mesh of process groups: this rank's line along each axis of spec/mesh.py."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.parallel.collectives import Axis
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.watch import Watch
from shardwright.spec.mesh import AXES, MeshShape


@dataclass(frozen=True)
class Mesh:
    """This rank's axes.

    `forward` and `backward` carry pipeline messages. With NCCL they are communicators of their own, so that a
    receive posted early for the one direction never stands before a message of the other. `ends` joins the first
    and the last stage, which share a tied embedding.
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
    device: torch.device
    ledger: Ledger
    watch: Watch | None

    def to_host(self, value: torch.Tensor) -> float:
        """The number in a tensor. On CUDA this is where the host waits for the device, and so for other ranks."""
        if self.watch is None or self.device.type == "cpu":
            return float(value)
        with self.watch.waiting(
            "the device's work, a collective in it", tuple(r for r in self.world.ranks if r != self.rank)
        ):
            return float(value)


def make_mesh(
    shape: MeshShape,
    rank: int,
    device: torch.device,
    timeout_s: float,
    watch: Watch | None = None,
    tied: bool = False,
) -> Mesh:
    """Create the process groups of every axis. All ranks of an initialised default group must call this.

    `tied` asks for the group of the pipeline's two ends.
    """
    ledger = Ledger(device)
    # The watch speaks first; this bound only ends a rank whose watch could not.
    timeout = timedelta(seconds=2 * timeout_s + 10)

    def axis(name: str, lines: list[list[int]]) -> Axis:
        mine = next((line for line in lines if rank in line), [rank])
        group = None
        for ranks in lines:  # every rank takes part in the creation of every group, in the same order
            if len(ranks) > 1:
                made = dist.new_group(ranks, timeout=timeout)
                group = made if ranks == mine else group
        return Axis(name, tuple(mine), mine.index(rank), group, ledger, watch)

    pipelines = shape.lines("pp")
    pp = axis("pp", pipelines)
    own_directions = device.type == "cuda"  # Gloo tells messages apart by their tags
    return Mesh(
        rank=rank,
        shape=shape,
        world=axis("world", shape.lines(*AXES)),
        pp=pp,
        dp=axis("dp", shape.lines("dp")),
        tp=axis("tp", shape.lines("tp")),
        forward=axis("pp", pipelines) if own_directions else pp,
        backward=axis("pp", pipelines) if own_directions else pp,
        ends=axis("ends", [[line[0], line[-1]] for line in pipelines] if tied and pp.size > 1 else []),
        device=device,
        ledger=ledger,
        watch=watch,
    )
