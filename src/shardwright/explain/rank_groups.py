"""The groups of ranks that rank 0 belongs to, by mesh axis, and the nodes that they lie on."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.cost.topology import Group
from shardwright.sharding.groups import (
    COPIES,
    CP,
    DP,
    EP,
    PP,
    REPLICAS,
    SHARDS,
    TP,
    WORLD,
    AxisGroups,
    Layout,
    axis_groups,
    ends,
)
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, in one of `num_groups` groups of a kind; `ranks` are those of rank 0's group, and `nodes`
    their nodes, in the same order."""

    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    num_groups: int
    carries: str
    layout: Layout

    @property
    def as_priced(self) -> Group:
        """The group's size, and the number of its ranks that share a node."""
        return Group(len(self.ranks), max(Counter(self.nodes).values()))


def rank_order(job: JobSpec) -> str:
    """The formula for a rank from its place on the axes: "rank = (pp x 2 + dp) x 2 + tp"."""
    mesh = MeshShape.of(job.plan)
    axes = list(mesh.sizes)
    if prod(mesh.sizes[axis] for axis in axes[axes.index("pp") + 1 :]) == mesh.block:
        return f"rank = {_nested(mesh.sizes)}"
    stage = {axis: size for axis, size in mesh.sizes.items() if axis != "pp"}
    pp, block = mesh.sizes["pp"], mesh.block  # experts inside pp take more neighbours than the axes inside it
    return f"rank = (s // {block} x {pp} + pp) x {block} + s % {block} with s = {_nested(stage)}"


def _nested(sizes: dict[str, int]) -> str:
    text = ""
    for axis, size in sizes.items():
        if size > 1:
            text = f"({text}) x {size} + {axis}" if " + " in text else f"{text} x {size} + {axis}" if text else axis
    return text or "0"


def first_node(job: JobSpec) -> dict[str, tuple[int, int]]:
    """The first and the last place of node 0's ranks on each axis; empty if nodes are unknown, or one node has all
    ranks."""
    mesh, per_node = MeshShape.of(job.plan), job.cluster.devices_per_node
    return mesh.ranges(range(per_node)) if 0 < per_node < mesh.world else {}


def groups_of_rank_0(job: JobSpec, placement: StagePlacement) -> list[RankGroup]:
    """One group for each axis with more than one rank, in the order in which a token meets them."""
    plan = job.plan
    has_experts, copies = job.model.moe.experts > 0, axis_groups(plan, COPIES[False])
    candidates = [axis_groups(plan, kind) for kind in (TP, CP, *[EP] * has_experts, PP)]
    candidates += [ends(plan, placement)] * job.model.shares_table
    candidates += [axis_groups(plan, SHARDS[False]), copies]
    candidates += [axis_groups(plan, REPLICAS[False])] * (copies.size > 1)  # else they are the shards' groups
    candidates += [axis_groups(plan, DP)] * job.data.separate_documents
    candidates += [axis_groups(plan, kind[True]) for kind in (SHARDS, COPIES) if has_experts]
    return [_group(job, axis_group) for axis_group in dict.fromkeys(candidates) if axis_group.size > 1]


def world_group(job: JobSpec) -> RankGroup:
    """All ranks."""
    return _group(job, axis_groups(job.plan, WORLD))


def _group(job: JobSpec, axis_group: AxisGroups) -> RankGroup:
    nodes = axis_group.nodes(0, node_devices(job.cluster))
    return RankGroup(
        axis_group.axis,
        tuple(axis_group.line(0)),
        tuple(nodes),
        axis_group.num_groups,
        axis_group.carries,
        axis_group.picked_layout,
    )
