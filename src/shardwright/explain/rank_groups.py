"""The groups of ranks that rank 0 belongs to, by mesh axis, and the nodes that they lie on."""

from collections import Counter
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.usual_links import node_devices
from shardwright.cost.topology import Group
from shardwright.sharding.groups import COPIES, CP, EP, PP, REPLICAS, SHARDS, TP, axis_groups, ends
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange something, `num_groups` of a kind; `ranks` are those of rank 0's. `nodes` are theirs, in the
    same order."""

    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    num_groups: int
    carries: str

    @property
    def as_priced(self) -> Group:
        """Its size, and how many of its ranks share a node."""
        return Group(len(self.ranks), max(Counter(self.nodes).values()))


def rank_order(job: JobSpec) -> str:
    """How a rank follows from its place on the axes: "rank = (pp x 2 + dp) x 2 + tp"."""
    sizes = {axis: size for axis, size in MeshShape.of(job.plan).sizes.items() if size > 1}
    text = ""
    for axis, size in sizes.items():
        text = f"({text}) x {size} + {axis}" if " + " in text else f"{text} x {size} + {axis}" if text else axis
    return f"rank = {text or '0'}"


def groups_of_rank_0(job: JobSpec, placement: StagePlacement) -> list[RankGroup]:
    """One for each axis with more than one rank, in the order in which a token meets them."""
    plan = job.plan
    has_experts, copies = job.model.moe.experts > 0, axis_groups(plan, COPIES[False])
    found = [axis_groups(plan, kind) for kind in (TP, CP, *[EP] * has_experts, PP)]
    found += [ends(plan, placement)] * job.model.tied_embeddings
    found += [axis_groups(plan, SHARDS[False]), copies]
    found += [axis_groups(plan, REPLICAS[False])] * (copies.size > 1)  # else they are those of the shards
    found += [axis_groups(plan, kind[True]) for kind in (SHARDS, COPIES) if has_experts]
    per_node = node_devices(job.cluster)
    return [
        RankGroup(of.axis, tuple(of.line(0)), tuple(of.nodes(0, per_node)), of.num_groups, of.carries)
        for of in dict.fromkeys(found)
        if of.size > 1
    ]
