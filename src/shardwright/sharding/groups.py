"""The groups of ranks of a plan, for process groups, the account, `explain` and the cost model alike.

A group is a line of the mesh (mesh.py): ranks whose places differ only along some axes. Its layout says how many ranks
it has and how far apart they lie, among the ranks of their stage. ZeRO adds two rules, for the lines of replicas only:

- Hybrid sharding cuts a line: `zero_ranks` neighbours share one set of shards, and ranks with the same place among such
  neighbours hold the same shard. It applies to experts if `zero_ranks` divides the number of their replicas.
- A pipeline that holds each stage twice (DualPipe) has the same stages at its positions i and pp - 1 - i, and their two
  lines share one set of shards.

Layouts are plain arithmetic, so that the numbers of a plan may also be arrays, with one entry per plan.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import Count, Degrees, by_order
from shardwright.sharding.mesh import AXES, axis_sizes, expert_axis_sizes
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class GroupKind:
    """Ranks along some axes; or, if they are replicas, the part of them that shares shards, or holds the same shard.

    `carries` says what travels between them. `unfolded` are the axes that the same ranks lie along if experts are laid
    out like all other parameters.
    """

    axes: tuple[str, ...]
    carries: str
    part: Literal["all", "shards", "copies"] = "all"
    unfolded: tuple[str, ...] = ()

    @property
    def is_folded(self) -> bool:
        """True for groups of experts, which lay out the ranks of a stage along axes of their own."""
        return self.axes[0] not in AXES


TP = GroupKind(("tp",), say("sums and gathers of activations, in every layer"))
CP = GroupKind(("cp",), say("keys and values, in every layer"))
DP = GroupKind(("dp",), say("how many targets count"))
PP = GroupKind(("pp",), say("activations to the next stage, their gradients back"))
EP = GroupKind(("ep",), say("tokens to their experts and back"))
ETP = GroupKind(("etp",), say("sums and gathers of activations, in every expert"), unfolded=("tp",))
WORLD = GroupKind(AXES, say("norms of gradients, and what is logged"))
# Ranks that hold the same part of a stage, or of its experts, and see different tokens. Keys: True for experts.
REPLICAS = {
    False: GroupKind(("dp", "cp"), say("the loss")),
    True: GroupKind(("edp",), say("gradients of experts, by shards and copies"), unfolded=("dp", "cp")),
}
SHARDS = {
    False: GroupKind(("dp", "cp"), say("gradients"), "shards"),
    True: GroupKind(("edp",), say("gradients of experts"), "shards", ("dp", "cp")),
}
COPIES = {
    False: GroupKind(("dp", "cp"), say("sums of shards of gradients"), "copies"),
    True: GroupKind(("edp",), say("sums of shards of gradients of experts"), "copies", ("dp", "cp")),
}


@dataclass(frozen=True)
class Layout:
    """The places of the ranks of a group: `num` of them, `stride` apart among the places of their stage.

    A `block` of places is as many neighbouring ranks, and the next block begins `pitch` ranks later
    (config/rank_order.py); places are the ranks themselves if the two are equal. `mirrors` is 2 if the ranks at the
    mirrored position of the pipeline belong to the group, too.
    """

    num: Count
    stride: Count
    block: Count
    pitch: Count
    mirrors: Count = 1

    @property
    def size(self) -> Count:
        """Number of ranks of a group."""
        return self.num * self.mirrors

    def split(self, num_ranks: Count) -> "tuple[Layout, Layout]":
        """(groups of `num_ranks` neighbours, groups of the ranks with the same place among such neighbours)."""
        copy_stride = self.stride * num_ranks
        return replace(self, num=num_ranks), replace(self, num=self.num // num_ranks, stride=copy_stride)

    def place(self, rank: int) -> int:
        """The place of a rank."""
        return int(rank // self.pitch * self.block + rank % self.block)

    def line(self, first: int) -> list[int]:
        """The ranks of the line that begins with rank `first`, without the mirrored ones."""
        block, pitch, place = int(self.block), int(self.pitch), self.place(first)
        places = range(place, place + int(self.num * self.stride), int(self.stride))
        if block == pitch:
            return list(places)
        stage = first - first % block - first // pitch * pitch  # the first rank of its stage's blocks
        return [place // block * pitch + stage + place % block for place in places]


def layout(plan: Degrees, kind: GroupKind) -> Layout:
    """The layout of the groups of a kind."""
    if kind in (PP, WORLD):
        world = plan.stage_ranks * plan.pp
        return Layout(plan.pp, plan.block, world, world) if kind == PP else Layout(world, 1, world, world)
    sizes = expert_axis_sizes(plan) if kind.is_folded else axis_sizes(plan)
    num = prod(sizes[axis] for axis in kind.axes)
    stride = by_order(
        plan,
        lambda order: order.experts if kind.is_folded else order.stage,
        lambda axes: _stride(axes, kind.axes, sizes),
    )
    full_line = Layout(num, stride, plan.block, plan.block * plan.pp)
    if kind.part == "all":
        return full_line
    shards, copies = full_line.split(_num_sharing(plan, num))
    return replace(shards, mirrors=plan.num_copies) if kind.part == "shards" else copies


def _stride(axes: tuple[str, ...], group_axes: tuple[str, ...], sizes: dict[str, Count]) -> Count:
    """Places between neighbours along some axes: the number of places that the inner axes have."""
    first = min(axes.index(axis) for axis in group_axes)
    return prod(sizes[axis] for axis in axes[:first])


def of_stage(plan: Degrees, num_ranks: int, mirrors: Count = 1) -> Count:
    """The number of `num_ranks` neighbouring ranks that are of one stage; all, if a stage's ranks are neighbours: the
    others have the groups of other stages at the same places.

    With `mirrors` 2 the ranks at the mirrored position of the pipeline count too, if the neighbours include whole
    pipelines. Then it matters which are of the stage itself.
    """
    pitch = plan.block * plan.pp
    remainder = num_ranks % pitch
    num_of_stage = num_ranks // pitch * plan.block + remainder - (remainder > plan.block) * (remainder - plan.block)
    num_of_stage = num_of_stage * (1 + (mirrors - 1) * (num_ranks >= pitch))
    are_all = (plan.block == plan.stage_ranks) & (mirrors == 1)
    return num_of_stage + are_all * (num_ranks - num_of_stage)


def _num_sharing(plan: Degrees, num_replicas: Count) -> Count:
    """The number of replicas of a line that share one set of ZeRO's shards."""
    is_cut = (plan.zero > 0) & is_hybrid(plan.zero_ranks, num_replicas)
    return num_replicas + is_cut * (plan.zero_ranks - num_replicas)


def is_hybrid(zero_ranks: Count, num_replicas: Count) -> Count:
    """True if sharding over `zero_ranks` ranks (0: all) makes several sets of shards of `num_replicas` replicas."""
    is_part = (zero_ranks > 0) & (zero_ranks < num_replicas)
    return is_part & (num_replicas % (zero_ranks + (zero_ranks < 1)) == 0)


@dataclass(frozen=True)
class AxisGroups:
    """All groups of one kind in a plan of `world` ranks, with the name of their axis in the ledger.

    `pipeline` is the layout of a pipeline. `picked` are the indices within each line of the ranks that take part; empty
    means all. `carries` says in words what the group communicates, for reports.
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
    def picked_layout(self) -> Layout:
        """The layout of the ranks that take part."""
        if not self.picked:
            return self.layout
        return replace(self.layout, num=self.size, stride=self.layout.stride * (self.picked[-1] - self.picked[0]))

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.world // int(self.layout.size)

    @property
    def is_mirrored(self) -> bool:
        """True if a group joins two positions of the pipeline."""
        return bool(self.layout.mirrors > 1)

    def lines(self) -> list[list[int]]:
        """The ranks of each group, in the order of their first ranks. No rank is in two groups."""
        full_line = self.layout
        firsts = [rank for rank in range(self.world) if full_line.place(rank) // full_line.stride % full_line.num == 0]
        if self.is_mirrored:
            firsts = [rank for rank in firsts if self._position(rank) < self.pipeline.num // 2]
        return [self.line(first) for first in firsts]

    def line(self, first: int) -> list[int]:
        """The ranks of the group that begins with rank `first`, ascending, as a process group numbers them."""
        ranks = self.layout.line(first)
        if self.is_mirrored:
            mirrored = self.pipeline.num - 1 - 2 * self._position(first)
            ranks = sorted([*ranks, *(rank + mirrored * self.pipeline.stride for rank in ranks)])
        return [ranks[place] for place in self.picked] or ranks

    def _position(self, rank: int) -> int:
        """A rank's position in its pipeline."""
        return int(rank // self.pipeline.stride % self.pipeline.num)

    def nodes(self, first: int, ranks_per_node: int) -> list[int]:
        """The node of each rank of the group that begins with rank `first`; 0 for all if `ranks_per_node` is 0."""
        return [rank // ranks_per_node if ranks_per_node else 0 for rank in self.line(first)]

    def split(self, num_ranks: int) -> "tuple[AxisGroups, AxisGroups]":
        """(groups of `num_ranks` neighbours on a line, groups of the ranks with the same place among neighbours)."""
        inner, outer = self.layout.split(num_ranks)
        return replace(self, layout=inner), replace(self, layout=outer)


def axis_groups(plan: PlanSpec, kind: GroupKind) -> AxisGroups:
    """The groups of a kind in one plan. Groups of the same name and layout are equal, whatever their kind."""
    groups_layout, carries = layout(plan, kind), kind.carries
    if kind.part == "shards" and plan.zero:
        carries += " and " + carries.replace("gradients", "parameters")
    is_cut = kind.part == "copies" or (
        kind.part == "shards" and groups_layout.size < num_replicas(plan, kind.is_folded)
    )
    name = _name(plan, kind) + f" {kind.part}" * is_cut
    return AxisGroups(name, groups_layout, plan.world, layout(plan, PP), carries=carries)


def _name(plan: PlanSpec, kind: GroupKind) -> str:
    """The axis of a kind: "dp cp" for both together, and "dp" if cp is 1."""
    if kind == WORLD:
        return "world"
    is_alike = plan.expert_tp_size == plan.tp and (plan.ep == 1 or kind == ETP)
    axes = kind.unfolded if kind.unfolded and is_alike else kind.axes
    return " ".join(axis for axis in axes if axis == axes[0] or getattr(plan, axis) > 1)


def ends(plan: PlanSpec, placement: StagePlacement) -> AxisGroups:
    """The ranks of each pipeline that hold its first and its last stage, and share a tied table; one rank if it holds
    both.

    In a pipeline that holds each stage twice, each end has both stages, and the replicas sum their gradients.
    """
    first, last = placement.holders[0][0], placement.holders[0][-1]
    picked = (first, last) if placement.num_copies == 1 and first != last else (first,)
    pipeline = layout(plan, PP)
    return AxisGroups("ends", pipeline, plan.world, pipeline, picked, say("gradients of the tied table"))


def num_replicas(plan: Degrees, is_expert: bool = False) -> Count:
    """Number of ranks that hold the same part of a stage, or of its experts, and sum its gradients."""
    return layout(plan, REPLICAS[is_expert]).size * plan.num_copies


def zero_stage(plan: PlanSpec, is_expert: bool = False) -> int:
    """The stage of ZeRO that takes effect on a stage's parameters, or on its experts'.

    0 if no rank shares their state with another, and there is nothing to shard. Parameters in host memory are gathered
    from there in any case.
    """
    return plan.zero if layout(plan, SHARDS[is_expert]).size > 1 or plan.offload_parameters else 0


def loses_gradients(plan: PlanSpec) -> bool:
    """True if a step loses a part of the gradients: they are compressed, and summed over several ranks."""
    return plan.compress != "none" and any(num_replicas(plan, is_expert) > 1 for is_expert in (False, True))
