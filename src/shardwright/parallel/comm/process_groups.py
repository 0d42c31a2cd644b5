"""The mesh of process groups: this rank's line along each axis of sharding/mesh.py."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.parallel.comm.collectives import Axis, NodeAxes
from shardwright.parallel.comm.compute_turns import Turns
from shardwright.parallel.comm.hang_watch import Watch
from shardwright.parallel.comm.ledger import Ledger
from shardwright.sharding.mesh import AXES, MeshShape
from shardwright.sharding.stage_placement import StagePlacement, in_line


@dataclass(frozen=True)
class ReplicaAxes:
    """The ranks that hold the same part of a stage, or of its experts, and sum its gradients.

    `shards` are those that share one set of ZeRO's shards, for the stages of each half of the pipeline, and `copies`
    those that hold the same shard: all of them and this rank alone, unless sharding is hybrid. The halves are one axis,
    unless a pipeline holds each stage twice: then the two ranks that hold a pair of stages finish them in opposite
    order.
    """

    shards: tuple[Axis, Axis]
    copies: Axis

    def sharing(self, stage: int, num_stages: int) -> tuple[Axis, Axis]:
        """The ranks that share the state of a stage, and those that hold copies of this rank's share."""
        return self.shards[stage >= num_stages // 2], self.copies


@dataclass(frozen=True)
class Mesh:
    """This rank's axes.

    `dp_cp` joins all ranks whose tokens are others, at one place of the model. `forward` and `backward` carry pipeline
    messages. With NCCL they are communicators of their own, so that a receive posted early for the one direction never
    stands before a message of the other. `ends` joins the first and the last stage, which share a tied embedding.
    `replicas` sum gradients, and `expert_replicas` those of experts, for which the ranks of a stage are folded into
    `ep` and `expert_tp` (sharding/mesh.py). `ep` knows its nodes where dispatch is node-aware.
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
        """Whether this rank's pipeline is the first of the replicas', and it the first of its cp and tp lines."""
        return self.dp.index == self.cp.index == self.tp.index == 0

    def to_host(self, value: torch.Tensor) -> float:
        """The number in a tensor. On CUDA this is where the host waits for the device, and so for other ranks."""
        if self.watch is None or self.device.type == "cpu":
            return float(value)
        with self.watch.waiting(
            "the device's work, a collective in it", tuple(r for r in self.world.ranks if r != self.rank)
        ):
            return float(value)


def make_mesh(
    plan: PlanSpec, rank: int, device: torch.device, timeout_s: float, watch: Watch | None = None,
    tied: bool = False, placement: StagePlacement | None = None, side_by_side: bool = False, ranks_per_node: int = 0,
) -> Mesh:  # fmt: skip
    """Create the process groups of every axis. All ranks of an initialised default group must call this.

    `tied` asks for the group of the pipeline's two ends. `placement` says where they are, and how many copies of the
    stages there are; `side_by_side`, that a forward and a backward pass may run at once. `ranks_per_node` neighbouring
    ranks share a node, if it is not 0.
    """
    shape, experts = MeshShape.of(plan), MeshShape.of_experts(plan)
    ledger, turns = Ledger(device, rank, ranks_per_node), Turns()
    placement = placement or in_line(plan.pp)
    # The watch speaks first; this bound only ends a rank whose watch could not.
    maker = _AxisMaker(rank, ledger, watch, turns, timedelta(seconds=2 * timeout_s + 10))
    twice = side_by_side and device.type == "cpu"  # on CUDA one thread issues both passes
    pipelines = shape.lines("pp")
    pp = maker.axis("pp", pipelines)
    dp = maker.axis("dp", shape.lines("dp"))
    dp_cp = maker.axis("dp cp", shape.lines("dp", "cp")) if plan.cp > 1 else dp
    tp = maker.axis("tp", shape.lines("tp"), twice)
    dense = maker.replicas(plan, placement, dp_cp, shape, ("dp", "cp"))
    is_folded = plan.ep > 1 or plan.expert_tp_size != plan.tp
    own_directions = device.type == "cuda"  # Gloo tells messages apart by their tags
    first, last = placement.holders[0][0], placement.holders[0][-1]
    has_ends = tied and placement.num_copies == 1 and first != last
    return Mesh(
        rank=rank,
        shape=shape,
        world=maker.axis("world", shape.lines(*AXES)),
        pp=pp,
        dp=dp,
        cp=maker.axis("cp", shape.lines("cp"), twice),
        tp=tp,
        dp_cp=dp_cp,
        ep=maker.expert_axis(plan, experts, ranks_per_node, twice),
        expert_tp=tp if plan.expert_tp_size == plan.tp else tp.alone("etp"),
        forward=maker.axis("pp", pipelines) if own_directions else pp,
        backward=maker.axis("pp", pipelines) if own_directions else pp,
        ends=maker.axis("ends", [[line[first], line[last]] for line in pipelines] if has_ends else []),
        replicas=dense,
        expert_replicas=maker.replicas(plan, placement, maker.axis("edp", experts.lines("edp")), experts, ("edp",))
        if is_folded
        else dense,
        device=device,
        ledger=ledger,
        turns=turns,
        watch=watch,
    )


@dataclass(frozen=True)
class _AxisMaker:
    """Makes the axes of one rank. All ranks must make the same ones in the same order."""

    rank: int
    ledger: Ledger
    watch: Watch | None
    turns: Turns
    timeout: timedelta

    def axis(self, name: str, lines: list[list[int]], twice: bool = False) -> Axis:
        """This rank's line; `twice` if a forward and a backward pass on threads of their own use it side by side."""
        mine = next((line for line in lines if self.rank in line), [self.rank])
        backward = self._group(lines) if twice else None
        return Axis(
            name, tuple(mine), mine.index(self.rank), self._group(lines), self.ledger, self.watch, backward, self.turns
        )

    def _group(self, lines: list[list[int]]) -> dist.ProcessGroup | None:
        mine = None
        for ranks in lines:  # every rank takes part in the creation of every group, in the same order
            if len(ranks) > 1:
                made = dist.new_group(ranks, timeout=self.timeout)
                mine = made if self.rank in ranks else mine
        return mine

    def replicas(
        self, plan: PlanSpec, placement: StagePlacement, line: Axis, shape: MeshShape, along: tuple[str, ...]
    ) -> ReplicaAxes:
        """The ranks that sum gradients with this one: `line`, which runs `along` some axes of a mesh, or parts of it
        under hybrid sharding, or two lines of a pipeline that holds each stage twice."""
        if placement.num_copies == 2:
            lines = shape.mirrored(*along)
            return ReplicaAxes(
                (self.axis(line.name, lines), self.axis(line.name, lines)), line.alone(f"{line.name} copies")
            )
        num_shards, num_copies = plan.sharing(is_expert=along == ("edp",))
        if num_copies == 1:
            return ReplicaAxes((line, line), line.alone(f"{line.name} copies"))
        lines = shape.lines(*along)
        inner = [ranks[i : i + num_shards] for ranks in lines for i in range(0, len(ranks), num_shards)]
        outer = [ranks[i::num_shards] for ranks in lines for i in range(num_shards)]
        shards = self.axis(f"{line.name} shards", inner)
        return ReplicaAxes((shards, shards), self.axis(f"{line.name} copies", outer))

    def expert_axis(self, plan: PlanSpec, experts: MeshShape, ranks_per_node: int, twice: bool) -> Axis:
        """The ranks that hold different experts, with its nodes where dispatch is node-aware."""
        lines = experts.lines("ep")
        whole = self.axis("ep", lines, twice)
        here = ep_ranks_of_node(plan, ranks_per_node) if plan.dispatch == "node-aware" else 0
        if here in (0, plan.ep):
            return whole
        between = self.axis("ep", [line[i::here] for line in lines for i in range(here)], twice)
        nodes = [line[i : i + here] for line in lines for i in range(0, plan.ep, here)]
        return replace(whole, by_node=NodeAxes(between, self.axis("ep", nodes, twice)))
