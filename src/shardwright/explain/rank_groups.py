"""The groups of ranks that rank 0 belongs to, by mesh axis, and the nodes that they lie on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.cost.topology import Group
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
    def num_nodes(self) -> int:
        """Nodes that it crosses."""
        return len(set(self.nodes))

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


def node_of(job: JobSpec, rank: int) -> int:
    """The node of a rank; all are on one where the cluster does not say."""
    return rank // job.cluster.devices_per_node if job.cluster.devices_per_node else 0


def groups_of_rank_0(job: JobSpec, placement: StagePlacement) -> list[RankGroup]:
    """One for each axis with more than one rank, in the order in which a token meets them."""
    return [group for group in _all_groups(job, placement) if len(group.ranks) > 1]


def _all_groups(job: JobSpec, placement: StagePlacement) -> Iterator[RankGroup]:
    plan = job.plan
    stage = plan.dp * plan.cp * plan.tp  # ranks of a stage, which are neighbours

    def group(axis: str, size: int, stride: int, carries: str) -> RankGroup:
        return _group(job, axis, tuple(range(0, size * stride, stride)), carries)

    yield group("tp", plan.tp, 1, "sums and gathers of activations, in every layer")
    yield group("cp", plan.cp, plan.tp, "keys and values, in every layer")
    if job.model.moe.experts:
        yield group("ep", plan.ep, plan.expert_tp_size, "tokens to their experts and back")
    messages = "activations to the next stage, their gradients back"
    yield group("pp", plan.pp, stage, messages)
    if job.model.tied_embeddings and placement.num_copies == 1 and placement.holders[0][0] != placement.holders[0][-1]:
        ends = placement.holders[0][0] * stage, placement.holders[0][-1] * stage
        yield _group(job, "ends", ends, "gradients of the tied table")
    yield from _replicas(job, placement, False)
    is_folded = plan.ep > 1 or plan.expert_tp_size != plan.tp
    if job.model.moe.experts and is_folded:
        yield from _replicas(job, placement, True)


def _replicas(job: JobSpec, placement: StagePlacement, is_expert: bool) -> Iterator[RankGroup]:
    """The groups that sum gradients: all replicas at once, or under hybrid sharding first those that share a set of
    shards."""
    plan = job.plan
    stride = plan.ep * plan.expert_tp_size if is_expert else plan.tp
    size = plan.expert_replicas if is_expert else plan.replicas
    axis = "edp" if is_expert else "dp" if plan.cp == 1 else "dp cp"
    of = " of experts" if is_expert else ""
    line = tuple(range(0, size * stride, stride))
    if placement.num_copies == 2:  # the other end of the pipeline holds the same stages
        line += tuple(rank + (plan.pp - 1) * plan.dp * plan.cp * plan.tp for rank in line)
    num_shards, num_copies = plan.sharing(is_expert)
    carries = f"gradients{of}" + (f" and parameters{of}" if plan.zero else "")
    if num_copies == 1 or placement.num_copies == 2:
        yield _group(job, axis, line, carries)
    else:
        yield _group(job, f"{axis} shards", line[:num_shards], carries)
        yield _group(job, f"{axis} copies", line[::num_shards], f"sums of shards of gradients{of}")
        if not is_expert:
            yield _group(job, axis, line, "the loss")


def _group(job: JobSpec, axis: str, ranks: tuple[int, ...], carries: str) -> RankGroup:
    num_groups = job.plan.tp * job.plan.dp * job.plan.cp if axis == "ends" else job.plan.world // len(ranks)
    return RankGroup(axis, ranks, tuple(node_of(job, rank) for rank in ranks), num_groups, carries)
