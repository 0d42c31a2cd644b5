"""The placement of a tensor on the mesh: over each axis it is cut along a dim, replicated, or a partial sum.

There are three notations. DTensor (PyTorch): Shard(dim), Replicate(), Partial(), one for each mesh axis. SBP (Yuan et
al. 2021, arXiv 2110.15032, section 3.1): S(dim), B, P. GSPMD (Xu et al. 2021, arXiv 2105.04663, section 3): for each
dim of the tensor the mesh axes that cut it, "-" if none; it has no notation for partial sums, which are named behind
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# The dim of a tensor that is cut only with the flat buffer that holds it and others (sharding/flat_buffer.py).
BUFFER = -1


@dataclass(frozen=True)
class TensorPlacement:
    """A tensor's placement over one axis of `size` ranks. `dim` is the tensor's dim that is cut, or BUFFER."""

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

    The states of an activation are "value" and "gradient"; those of a parameter "in use", "between uses", "gradient",
    "summed gradient" and "optimizer". `rows_vary` is True if a gate decides the length of dim 0: the shape is expected.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    states: Mapping[str, Placements]
    rows_vary: bool = False

    def gspmd(self, state: str) -> str:
        """ "[cp+tp, dp, -]", followed by " unreduced tp" if it is a partial sum over tp."""
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
    """Placements on all of `axes`, which are given with their sizes: cut along the dims in `dim_of`, partial over
    `sums`, else replicated. An axis of one rank replicates: there every placement is the same."""
    by_axis = []
    for axis, size in axes.items():
        if size > 1 and dim_of is not None and axis in dim_of:
            by_axis.append(TensorPlacement(axis, size, "shard", dim_of[axis]))
        else:
            by_axis.append(TensorPlacement(axis, size, "partial" if size > 1 and axis in sums else "replicate"))
    return tuple(by_axis)
