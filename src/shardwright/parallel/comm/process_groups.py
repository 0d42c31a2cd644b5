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
from shardwright.sharding.stage_placement import Placement, in_line


@dataclass(frozen=True)
class Replicas:
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
    replicas: Replicas
    expert_replicas: Replicas
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
    tied: bool = False, placement: Placement | None = None, side_by_side: bool = False, ranks_per_node: int = 0,
) -> Mesh:  # fmt: skip
    """Create the process groups of every axis. All ranks of an initialised default group must call this.

    `tied` asks for the group of the pipeline's two ends. `placement` says where they are, and how many copies of the
    stages there are; `side_by_side`, that a forward and a backward pass may run at once. `ranks_per_node` neighbouring
    ranks share a node, if it is not 0.
    """
    shape, experts = MeshShape.of(plan), MeshShape.of_experts(plan)
    ledger, turns = Ledger(device, rank, ranks_per_node), Turns()
    two_threads = side_by_side and device.type == "cpu"  # on CUDA one thread issues both passes
    placement = placement or in_line(plan.pp)
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

    def replicas(line: Axis, along: tuple[str, ...], of: MeshShape, is_expert: bool) -> Replicas:
        if placement.num_copies == 2:
            lines = of.mirrored(*along)
            return Replicas((axis(line.name, lines), axis(line.name, lines)), line.alone(f"{line.name} copies"))
        num_shards, num_copies = plan.sharing(is_expert)
        if num_copies == 1:
            return Replicas((line, line), line.alone(f"{line.name} copies"))
        inner = [ranks[i : i + num_shards] for ranks in of.lines(*along) for i in range(0, len(ranks), num_shards)]
        outer = [ranks[i::num_shards] for ranks in of.lines(*along) for i in range(num_shards)]
        shards = axis(f"{line.name} shards", inner)
        return Replicas((shards, shards), axis(f"{line.name} copies", outer))

    def expert_axis() -> Axis:
        lines = experts.lines("ep")
        whole = axis("ep", lines, twice=two_threads)
        here = ep_ranks_of_node(plan, ranks_per_node) if plan.dispatch == "node-aware" else 0
        if here in (0, plan.ep):
            return whole
        between = axis("ep", [line[i::here] for line in lines for i in range(here)], twice=two_threads)
        nodes = [line[i : i + here] for line in lines for i in range(0, plan.ep, here)]
        return replace(whole, by_node=NodeAxes(between, axis("ep", nodes, twice=two_threads)))

    pipelines = shape.lines("pp")
    pp = axis("pp", pipelines)
    dp = axis("dp", shape.lines("dp"))
    dp_cp = axis("dp cp", shape.lines("dp", "cp")) if plan.cp > 1 else dp
    tp = axis("tp", shape.lines("tp"), twice=two_threads)
    is_folded = plan.ep > 1 or plan.expert_tp_size != plan.tp
    dense = replicas(dp_cp, ("dp", "cp"), shape, is_expert=False)
    own_directions = device.type == "cuda"  # Gloo tells messages apart by their tags
    first, last = placement.holders[0][0], placement.holders[0][-1]
    has_ends = tied and placement.num_copies == 1 and first != last
    return Mesh(
        rank=rank,
        shape=shape,
        world=axis("world", shape.lines(*AXES)),
        pp=pp,
        dp=dp,
        cp=axis("cp", shape.lines("cp"), twice=two_threads),
        tp=tp,
        dp_cp=dp_cp,
        ep=expert_axis(),
        expert_tp=tp if plan.expert_tp_size == plan.tp else tp.alone("etp"),
        forward=axis("pp", pipelines) if own_directions else pp,
        backward=axis("pp", pipelines) if own_directions else pp,
        ends=axis("ends", [[line[first], line[last]] for line in pipelines] if has_ends else []),
        replicas=dense,
        expert_replicas=replicas(axis("edp", experts.lines("edp")), ("edp",), experts, is_expert=True)
        if is_folded
        else dense,
        device=device,
        ledger=ledger,
        turns=turns,
        watch=watch,
    )
