"""The mesh: the coordinates of each rank, and the axes along which ranks are laid out.

With the default order of the axes (config/rank_order.py has the others) the whole layout is one line,
arange(world).view(pp, dp, cp, tp). The last axis varies fastest, so the ranks of one tensor-parallel group are
neighbours and stay inside a node, where links are fast. Pipeline stages are farthest apart, because they usually
exchange the least. If stages are nearer than replicas, the layout is view(dp, pp, cp, tp).

Experts fold the same ranks of a stage differently (Liu et al. 2025, arXiv 2504.14960, section 3):
arange(world).view(pp, edp, ep, etp). The ranks of an ep line hold different experts and exchange tokens, so they are
neighbours too; the ranks of an edp line hold the same experts and sum their gradients.
"""

import math
from dataclasses import dataclass

from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import ORDERS, Count, Degrees, number_of

AXES = ("pp", "dp", "cp", "tp")


def axis_sizes(plan: Degrees) -> dict[str, Count]:
    """Number of ranks along each axis."""
    return {axis: getattr(plan, axis) for axis in AXES}


def expert_axis_sizes(plan: Degrees) -> dict[str, Count]:
    """Number of ranks along each axis of the experts' mesh; edp is at least 1."""
    etp = plan.expert_tp_size
    edp = plan.dp * plan.cp * plan.tp // (plan.ep * etp)
    return {"pp": plan.pp, "edp": edp + (edp < 1), "ep": plan.ep, "etp": etp}


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, slowest first, and the place of a rank on each. groups.py has the ranks along them.

    `block` neighbouring ranks are of one stage, and the ranks of the next stage follow.
    """

    sizes: dict[str, int]
    block: int

    @classmethod
    def of(cls, plan: PlanSpec) -> "MeshShape":
        """The mesh of a plan."""
        sizes = axis_sizes(plan)
        axes = [axis for axis in reversed(ORDERS[number_of(plan.order)].axes) if axis in sizes]
        if plan.block == plan.stage_ranks:  # all ranks of a stage are neighbours, and pp is the slowest axis
            axes.sort(key="pp".__ne__)
        return cls({axis: sizes[axis] for axis in axes}, plan.block)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        blocks, rank_in_stage = divmod(rank, self.block)
        outer_index, stage = divmod(blocks, self.sizes["pp"])
        rank_in_stage += outer_index * self.block
        coordinates = {"pp": stage}
        for axis in reversed(self.sizes):
            if axis != "pp":
                rank_in_stage, coordinates[axis] = divmod(rank_in_stage, self.sizes[axis])
        return {axis: coordinates[axis] for axis in self.sizes}

    def describe(self, rank: int) -> str:
        """ "rank 3 (pp 0, dp 1, tp 1)"."""
        place = self.coordinates(rank)
        return f"rank {rank} ({', '.join(f'{axis} {place[axis]}' for axis in self._shown())})"

    def lines(self) -> list[str]:
        """The sizes of the axes, and the mapping of ranks to coordinates: one line for the ranks along the fastest
        axis."""
        sizes = " x ".join(f"{axis} {self.sizes[axis]}" for axis in self._shown())
        outer = self._shown()[:-1]
        ranks_of: dict[str, list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            ranks_of.setdefault(", ".join(f"{axis} {place[axis]}" for axis in outer), []).append(rank)
        lines = [
            say("  {places}: ranks {ranks}", places=places, ranks=" ".join(map(str, ranks)))
            for places, ranks in ranks_of.items()
        ]
        return [say("mesh {sizes}", sizes=sizes), *lines]

    def ranges(self, ranks: range) -> dict[str, tuple[int, int]]:
        """The first and the last place of some ranks, on each axis with more than one."""
        places = [self.coordinates(rank) for rank in ranks]
        on_axes = {axis: [place[axis] for place in places] for axis, size in self.sizes.items() if size > 1}
        return {axis: (min(numbers), max(numbers)) for axis, numbers in on_axes.items()}

    def _shown(self) -> list[str]:
        """The axes that are shown to the user: cp only if it is used."""
        return [axis for axis, size in self.sizes.items() if axis != "cp" or size > 1]
