"""Who shares what: the groups of ranks of a plan, for process groups, the account, `explain` and the cost model alike.

A group is a line of the mesh (mesh.py): ranks whose places differ along some axes alone. Its layout says how many ranks
it has and how far apart they lie. ZeRO adds two rules, for the lines of replicas alone:

- Hybrid sharding cuts a line: `zero_ranks` neighbours share one set of shards, and those with one place among such
  neighbours hold the same shard. It applies to experts where it divides the number of their replicas.
- A pipeline that holds each stage twice (DualPipe) has the same stages at its positions i and pp - 1 - i, and their two
  lines share one set of shards.

Layouts are plain arithmetic, so that the numbers of a plan may also be arrays, with one entry a plan.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from shardwright.config.plan import PlanSpec
from shardwright.sharding.mesh import AXES, Count, Degrees, axis_sizes, expert_axis_sizes
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class GroupKind:
    """Ranks along some axes, slowest first; or of the replicas among them those that share shards, or hold the same.

    `carries` says what travels between them. `unfolded` are the axes that the same ranks lie along where experts are
    laid out as all else is.
    """

    axes: tuple[str, ...]
    carries: str
    part: Literal["all", "shards", "copies"] = "all"
    unfolded: tuple[str, ...] = ()

    @property
    def is_folded(self) -> bool:
        """Whether it is of experts, which fold the ranks of a stage otherwise."""
        return self.axes[0] not in AXES


TP = GroupKind(("tp",), "sums and gathers of activations, in every layer")
CP = GroupKind(("cp",), "keys and values, in every layer")
DP = GroupKind(("dp",), "how many targets count")
PP = GroupKind(("pp",), "activations to the next stage, their gradients back")
EP = GroupKind(("ep",), "tokens to their experts and back")
ETP = GroupKind(("etp",), "sums and gathers of activations, in every expert", unfolded=("tp",))
WORLD = GroupKind(AXES, "norms of gradients, and what is logged")
# Ranks that hold the same part of a stage, or of its experts, and see other tokens; by whether it is of experts.
REPLICAS = {
    False: GroupKind(("dp", "cp"), "the loss"),
    True: GroupKind(("edp",), "gradients of experts, by shards and copies", unfolded=("dp", "cp")),
}
SHARDS = {
    False: GroupKind(("dp", "cp"), "gradients", "shards"),
    True: GroupKind(("edp",), "gradients of experts", "shards", ("dp", "cp")),
}
COPIES = {
    False: GroupKind(("dp", "cp"), "sums of shards of gradients", "copies"),
    True: GroupKind(("edp",), "sums of shards of gradients of experts", "copies", ("dp", "cp")),
}


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a group lie: dims of (number of ranks, how far apart they are), fastest first.

    `mirrors` is 2 where those at the mirrored position of the pipeline belong to the group, too.
    """

    dims: tuple[tuple[Count, Count], ...]
    mirrors: Count = 1

    @property
    def size(self) -> Count:
        """Number of ranks of a group."""
        return prod((size for size, _ in self.dims), start=self.mirrors)

    @property
    def stride(self) -> Count:
        """How far apart neighbours are."""
        return self.dims[0][1]

    def split(self, num_ranks: Count) -> "tuple[Layout, Layout]":
        """(groups of so many neighbours, groups of the ranks with one place among such neighbours)."""
        ((size, stride),) = self.dims
        return Layout(((num_ranks, stride),)), Layout(((size // num_ranks, stride * num_ranks),))


def layout(plan: Degrees, kind: GroupKind) -> Layout:
    """The layout of the groups of a kind."""
    whole = _along(kind.axes, expert_axis_sizes(plan) if kind.is_folded else axis_sizes(plan))
    if kind.part == "all":
        return whole
    shards, copies = whole.split(_num_sharing(plan, whole.size))
    return Layout(shards.dims, plan.num_copies) if kind.part == "shards" else copies


def _along(axes: tuple[str, ...], sizes: dict[str, Count]) -> Layout:
    """Lines along some axes of a mesh of such sizes, slowest first. Neighbouring axes are one dim."""
    dims: list[tuple[Count, Count]] = []
    stride: Count = 1
    continues = False
    for axis, size in reversed(sizes.items()):
        if axis in axes:
            inner, apart = dims.pop() if continues else (1, stride)
            dims.append((inner * size, apart))
        continues = axis in axes
        stride = stride * size
    return Layout(tuple(dims))


def _num_sharing(plan: Degrees, num_replicas: Count) -> Count:
    """How many of a line of replicas share one set of ZeRO's shards."""
    is_cut = (plan.zero > 0) & is_hybrid(plan.zero_ranks, num_replicas)
    return num_replicas + is_cut * (plan.zero_ranks - num_replicas)


def is_hybrid(zero_ranks: Count, num_replicas: Count) -> Count:
    """Whether ZeRO's shards over so many ranks, 0 for all, are there several times among so many replicas."""
    is_part = (zero_ranks > 0) & (zero_ranks < num_replicas)
    return is_part & (num_replicas % (zero_ranks + (zero_ranks < 1)) == 0)


@dataclass(frozen=True)
class AxisGroups:
    """All groups of one kind in a plan of `world` ranks, under the name of their axis in the ledger.

    `pipeline` is the layout of a pipeline. `picked` are the places on each line that take part, where not all do.
    """

    axis: str
    layout: Layout
    world: int
    pipeline: Layout
    picked: tuple[int, ...] = ()
    carries: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return len(self.picked) or int(self.layout.size)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.world // int(self.layout.size)

    @property
    def is_mirrored(self) -> bool:
        """Whether a group joins two positions of the pipeline."""
        return bool(self.layout.mirrors > 1)

    def lines(self) -> list[list[int]]:
        """The ranks of each group, in the order of their first ranks. No rank is in two."""
        firsts = [r for r in range(self.world) if all(r // stride % size == 0 for size, stride in self.layout.dims)]
        if self.is_mirrored:
            ((pp, stride),) = self.pipeline.dims
            firsts = [rank for rank in firsts if rank // stride % pp < pp // 2]
        return [self.line(first) for first in firsts]

    def line(self, first: int) -> list[int]:
        """The ranks of the group that begins with rank `first`."""
        ranks = [first]
        for size, stride in self.layout.dims:
            ranks = [rank + place * stride for place in range(size) for rank in ranks]
        if self.is_mirrored:
            ((pp, stride),) = self.pipeline.dims
            mirrored = pp - 1 - 2 * (first // stride % pp)
            ranks += [rank + mirrored * stride for rank in ranks]
        return [ranks[place] for place in self.picked] or ranks

    def nodes(self, first: int, ranks_per_node: int) -> list[int]:
        """The node of each rank of the group that begins with rank `first`; all on one where nodes are not known, 0."""
        return [rank // ranks_per_node if ranks_per_node else 0 for rank in self.line(first)]

    def split(self, num_ranks: int) -> "tuple[AxisGroups, AxisGroups]":
        """(groups of so many neighbours on a line, groups of the ranks with one place among such neighbours)."""
        inner, outer = self.layout.split(num_ranks)
        return replace(self, layout=inner), replace(self, layout=outer)


def axis_groups(plan: PlanSpec, kind: GroupKind) -> AxisGroups:
    """The groups of a kind in one plan. What is of one name and one layout is equal, whatever its kind."""
    mine, carries = layout(plan, kind), kind.carries
    if kind.part == "shards" and plan.zero:
        carries += " and " + carries.replace("gradients", "parameters")
    is_cut = kind.part == "copies" or (kind.part == "shards" and mine.size < num_replicas(plan, kind.is_folded))
    name = _name(plan, kind) + f" {kind.part}" * is_cut
    return AxisGroups(name, mine, plan.world, layout(plan, PP), carries=carries)


def _name(plan: PlanSpec, kind: GroupKind) -> str:
    """The axis of a kind: "dp cp" is of both together, and "dp" where cp is 1."""
    if kind == WORLD:
        return "world"
    is_alike = plan.expert_tp_size == plan.tp and (plan.ep == 1 or kind == ETP)
    axes = kind.unfolded if kind.unfolded and is_alike else kind.axes
    return " ".join(axis for axis in axes if axis == axes[0] or getattr(plan, axis) > 1)


def ends(plan: PlanSpec, placement: StagePlacement) -> AxisGroups:
    """The ranks of each pipeline with its first and its last stage, which share a tied table; one where both are on it.

    Of a pipeline that holds each stage twice, each end has both, and the replicas sum their gradients.
    """
    first, last = placement.holders[0][0], placement.holders[0][-1]
    picked = (first, last) if placement.num_copies == 1 and first != last else (first,)
    pipeline = layout(plan, PP)
    return AxisGroups("ends", pipeline, plan.world, pipeline, picked, "gradients of the tied table")


def num_replicas(plan: Degrees, is_expert: bool = False) -> Count:
    """Ranks that hold the same part of a stage, or of its experts, and sum its gradients."""
    return layout(plan, REPLICAS[is_expert]).size * plan.num_copies


def zero_stage(plan: PlanSpec, is_expert: bool = False) -> int:
    """The stage of ZeRO that takes effect on a stage's parameters, or on its experts'.

    0 where no rank shares their state with another and there is nothing to shard; parameters in host memory are
    gathered from there even so.
    """
    return plan.zero if layout(plan, SHARDS[is_expert]).size > 1 or plan.offload_parameters else 0


def loses_gradients(plan: PlanSpec) -> bool:
    """Whether a step leaves out a part of the gradients: they are compressed, and summed over several ranks."""
    return plan.compress != "none" and any(num_replicas(plan, is_expert) > 1 for is_expert in (False, True))
