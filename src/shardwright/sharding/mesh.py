"""The mesh: which rank stands where, and along which axes ranks are laid out, in which order.

The whole layout is one line, arange(world).view(pp, dp, cp, tp). The last axis varies fastest, so the ranks of one
tensor-parallel group are neighbours and stay inside a node, where links are fast; pipeline stages are farthest
apart, for they exchange the least.

Experts fold the same ranks of a stage otherwise (Liu et al. 2025, arXiv 2504.14960, section 3): arange(world).view(pp,
edp, ep, etp). The ranks of an ep line hold different experts and exchange tokens, so they are neighbours too; those of
an edp line hold the same ones and sum their gradients.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.config.plan import PlanSpec

AXES = ("pp", "dp", "cp", "tp")  # slowest first
_FOLDED = {"dp": "edp", "cp": "ep", "tp": "etp"}  # what stands in their places for experts

Count = Any  # an int; or an array with one entry a plan, where many plans are described at once


class Degrees(Protocol):
    """Numbers of a plan that say who is with whom: of a PlanSpec, or of many plans in arrays (workload/query.py)."""

    @property
    def pp(self) -> Count: ...
    @property
    def dp(self) -> Count: ...
    @property
    def cp(self) -> Count: ...
    @property
    def tp(self) -> Count: ...
    @property
    def ep(self) -> Count: ...
    @property
    def expert_tp_size(self) -> Count: ...
    @property
    def zero(self) -> Count: ...
    @property
    def zero_ranks(self) -> Count: ...
    @property
    def num_copies(self) -> Count: ...


def axis_sizes(plan: Degrees) -> dict[str, Count]:
    """Number of ranks along each axis, slowest first."""
    return {axis: getattr(plan, axis) for axis in AXES}


def expert_axis_sizes(plan: Degrees) -> dict[str, Count]:
    """Number of ranks along each axis as experts fold them, slowest first; at least one holds each expert."""
    etp = plan.expert_tp_size
    edp = plan.dp * plan.cp * plan.tp // (plan.ep * etp)
    sizes = {"pp": plan.pp, "edp": edp + (edp < 1), "ep": plan.ep, "etp": etp}
    return {axis: sizes[axis] for axis in (_FOLDED.get(axis, axis) for axis in AXES)}


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, slowest first, and the place of a rank on each. groups.py has the ranks along them."""

    sizes: dict[str, int]

    @classmethod
    def of(cls, plan: PlanSpec) -> "MeshShape":
        """The mesh of a plan."""
        return cls(axis_sizes(plan))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for axis in reversed(self.sizes):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return {axis: place[axis] for axis in self.sizes}

    def describe(self, rank: int) -> str:
        """ "rank 3 (pp 0, dp 1, tp 1)"."""
        place = self.coordinates(rank)
        return f"rank {rank} ({', '.join(f'{axis} {place[axis]}' for axis in self._shown())})"

    def __str__(self) -> str:
        """The mapping of ranks to coordinates, a line for the neighbours along the fastest axis."""
        lines = ["mesh " + " x ".join(f"{axis} {self.sizes[axis]}" for axis in self._shown())]
        *outer, last = self._shown()
        for first in range(0, math.prod(self.sizes.values()), self.sizes[last]):
            place, ranks = self.coordinates(first), range(first, first + self.sizes[last])
            where = ", ".join(f"{axis} {place[axis]}" for axis in outer)
            lines.append(f"  {where}: ranks {' '.join(map(str, ranks))}")
        return "\n".join(lines)

    def _shown(self) -> list[str]:
        """The axes that are named to the user: few plans share sequences."""
        return [axis for axis, size in self.sizes.items() if axis != "cp" or size > 1]
