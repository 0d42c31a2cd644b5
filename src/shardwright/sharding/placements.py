"""How a tensor lies on the mesh: over each axis cut along a dim, the same everywhere, or a part of a sum.

Three notations for one thing. DTensor (PyTorch): Shard(dim), Replicate(), Partial(), one for each mesh axis. SBP (Yuan
et al. 2021, arXiv 2110.15032, section 3.1): S(dim), B, P. GSPMD (Xu et al. 2021, arXiv 2105.04663, section 3): for each
dim of the tensor the mesh axes that cut it, "-" if none; of partial sums it has no notation, and they are named after.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# In place of a dim: what is cut is the flat buffer in which the tensor lies with others (sharding/flat_buffer.py).
BUFFER = -1


@dataclass(frozen=True)
class TensorPlacement:
    """On one axis of `size` ranks. `dim` is that of the tensor that is cut, or BUFFER."""

    axis: str
    size: int
    kind: Literal["shard", "replicate", "partial"] = "replicate"
    dim: int = 0

    @property
    def dtensor(self) -> str:
        """Shard(0), Replicate() or Partial()."""
        if self.kind == "shard":
            return "Shard(0) of the buffer" if self.dim == BUFFER else f"Shard({self.dim})"
        return {"replicate": "Replicate()", "partial": "Partial()"}[self.kind]

    @property
    def sbp(self) -> str:
        """S(0), B or P."""
        if self.kind == "shard":
            return "S(buffer)" if self.dim == BUFFER else f"S({self.dim})"
        return {"replicate": "B", "partial": "P"}[self.kind]


Placements = tuple[TensorPlacement, ...]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of the model or of a step: its dims by name, its whole shape, and its placements in each state.

    Of an activation the states are "value" and "gradient"; of a parameter "in use", "between uses", "gradient",
    "summed gradient" and "optimizer". `rows_vary` says that a gate decides how long dim 0 is: the shape is expected.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    states: Mapping[str, Placements]
    rows_vary: bool = False

    def gspmd(self, state: str) -> str:
        """ "[cp+tp, dp, -]", with " unreduced tp" behind it where there are partial sums over tp."""
        placements = [p for p in self.states[state] if p.size > 1]
        axes_of_dim = [
            [p.axis for p in placements if p.kind == "shard" and p.dim == dim] for dim in range(len(self.shape))
        ]
        text = "[" + ", ".join("+".join(axes) or "-" for axes in axes_of_dim) + "]"
        buffers = [p.axis for p in placements if p.kind == "shard" and p.dim == BUFFER]
        sums = [p.axis for p in placements if p.kind == "partial"]
        return text + "".join(
            f" {word} {'+'.join(axes)}" for word, axes in (("buffer", buffers), ("unreduced", sums)) if axes
        )


def placements(
    axes: Mapping[str, int], dim_of: Mapping[str, int] | None = None, sums: tuple[str, ...] = ()
) -> Placements:
    """Placements on all of `axes`, by size: cut along the dims in `dim_of`, partial over `sums`, else replicated. An
    axis of one rank replicates: there every placement is the same."""
    by_axis = []
    for axis, size in axes.items():
        if size > 1 and dim_of is not None and axis in dim_of:
            by_axis.append(TensorPlacement(axis, size, "shard", dim_of[axis]))
        else:
            by_axis.append(TensorPlacement(axis, size, "partial" if size > 1 and axis in sums else "replicate"))
    return tuple(by_axis)
