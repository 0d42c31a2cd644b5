"""The mesh: which rank stands where.

The whole layout is one line, arange(world).view(pp, dp, tp). The last axis varies fastest, so the ranks of one
tensor-parallel group are neighbours and stay inside a node, where links are fast; pipeline stages are farthest
apart, for they exchange the least.
"""

from dataclasses import dataclass

from shardwright.spec.plan import PlanSpec

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes, and the arithmetic between ranks and coordinates."""

    sizes: dict[str, int]

    @classmethod
    def of(cls, plan: PlanSpec) -> "MeshShape":
        """The mesh of a plan."""
        return cls({axis: getattr(plan, axis) for axis in AXES})

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return {axis: place[axis] for axis in AXES}

    def lines(self, *along: str) -> list[list[int]]:
        """The groups of ranks that differ only in the axes `along`. Every rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        world = 1
        for size in self.sizes.values():
            world *= size
        for rank in range(world):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[a] for a in AXES if a not in along), []).append(rank)
        return list(groups.values())

    def mirrored(self) -> list[list[int]]:
        """Ranks that hold the same stages of a bidirectional pipeline: positions i and pp - 1 - i, and all of dp."""
        groups: dict[tuple[int, int], list[int]] = {}
        for line in self.lines("dp"):
            place = self.coordinates(line[0])
            groups.setdefault((min(place["pp"], self.sizes["pp"] - 1 - place["pp"]), place["tp"]), []).extend(line)
        return list(groups.values())

    def describe(self, rank: int) -> str:
        """ "rank 3 (pp 0, dp 1, tp 1)"."""
        return f"rank {rank} ({', '.join(f'{a} {i}' for a, i in self.coordinates(rank).items())})"

    def __str__(self) -> str:
        """The mapping of ranks to coordinates, a line for each tensor-parallel group."""
        lines = ["mesh " + " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())]
        for ranks in self.lines("tp"):
            place = self.coordinates(ranks[0])
            where = ", ".join(f"{axis} {place[axis]}" for axis in AXES[:-1])
            lines.append(f"  {where}: ranks {' '.join(map(str, ranks))}")
        return "\n".join(lines)
