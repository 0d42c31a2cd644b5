"""The mesh: which rank stands where.

The whole layout is one line, arange(world).view(pp, dp, cp, tp). The last axis varies fastest, so the ranks of one
tensor-parallel group are neighbours and stay inside a node, where links are fast; pipeline stages are farthest
apart, for they exchange the least.

Experts fold the same ranks of a stage otherwise (Liu et al. 2025, arXiv 2504.14960, section 3): arange(world).view(pp,
edp, ep, etp). The ranks of an ep line hold different experts and exchange tokens, so they are neighbours too; those of
an edp line hold the same ones and sum their gradients.
"""

import math
from dataclasses import dataclass

from shardwright.config.plan import PlanSpec

AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, slowest first, and the arithmetic between ranks and coordinates."""

    sizes: dict[str, int]

    @classmethod
    def of(cls, plan: PlanSpec) -> "MeshShape":
        """The mesh of a plan."""
        return cls({axis: getattr(plan, axis) for axis in AXES})

    @classmethod
    def of_experts(cls, plan: PlanSpec) -> "MeshShape":
        """The mesh of a plan as its experts fold it."""
        sizes = (plan.pp, plan.expert_replicas, plan.ep, plan.expert_tp_size)
        return cls(dict(zip(EXPERT_AXES, sizes, strict=True)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for axis in reversed(self.sizes):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return {axis: place[axis] for axis in self.sizes}

    def lines(self, *along: str) -> list[list[int]]:
        """The groups of ranks that differ only in the axes `along`. Every rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(self.sizes.values())):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[a] for a in self.sizes if a not in along), []).append(rank)
        return list(groups.values())

    def mirrored(self, *along: str) -> list[list[int]]:
        """Lines `along`, joined where ranks hold the same stages of a bidirectional pipeline: positions i and pp - 1
        - i."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for line in self.lines(*along):
            place = self.coordinates(line[0])
            stage = min(place["pp"], self.sizes["pp"] - 1 - place["pp"])
            rest = (place[axis] for axis in self.sizes if axis != "pp" and axis not in along)
            groups.setdefault((stage, *rest), []).extend(line)
        return list(groups.values())

    def describe(self, rank: int) -> str:
        """ "rank 3 (pp 0, dp 1, tp 1)"."""
        place = self.coordinates(rank)
        return f"rank {rank} ({', '.join(f'{axis} {place[axis]}' for axis in self._shown())})"

    def __str__(self) -> str:
        """The mapping of ranks to coordinates, a line for each tensor-parallel group."""
        lines = ["mesh " + " x ".join(f"{axis} {self.sizes[axis]}" for axis in self._shown())]
        *outer, last = self._shown()
        for ranks in self.lines(last):
            place = self.coordinates(ranks[0])
            where = ", ".join(f"{axis} {place[axis]}" for axis in outer)
            lines.append(f"  {where}: ranks {' '.join(map(str, ranks))}")
        return "\n".join(lines)

    def _shown(self) -> list[str]:
        """The axes that are named to the user: few plans share sequences."""
        return [axis for axis, size in self.sizes.items() if axis != "cp" or size > 1]
