"""The place of a parameter: which part of which tensor of the model a rank holds."""

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterShard:
    """A rank's part of a tensor.

    `box` has a half-open range for each dim of `full_shape`. `sharded_over` names the axes that cut the tensor;
    over all others it is replicated. `summed_over` names axes whose ranks each compute only a part of the gradient
    of a replicated parameter (a norm under sequence parallel), so that the parts must be summed. The replicas of an
    expert's parameter are other ranks than those of the rest of the layer (sharding/mesh.py).
    """

    full_shape: tuple[int, ...]
    box: Box
    init: str  # "normal", "zeros" or "ones"
    std: float = 0.0
    name: str = ""
    sharded_over: tuple[str, ...] = ()
    summed_over: tuple[str, ...] = ()
    is_expert: bool = False
    num_parts: int = 1  # that the axes cut the tensor into, of unequal sizes where it has to be
    is_tied: bool = False  # the same tensor has another use, on the first or the last stage
    is_exact: bool = False  # computed with in float32, whatever the rest is computed in

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the full tensor."""
        return tuple(slice(start, stop) for start, stop in self.box)

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def is_put_off(self) -> bool:
        """True if a backward that is split leaves its gradient for W: those of layers, and of what stands before the
        head for further tokens. The embedding's is no product, and the head's is made with the loss."""
        return self.name.startswith(("layers.", "mtp."))

    @property
    def mean_elements(self) -> float:
        """Elements of a part, were all equal: the same number on every rank, whichever part it holds."""
        return math.prod(self.full_shape) / self.num_parts
