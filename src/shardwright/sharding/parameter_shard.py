"""The place of a parameter: the part that a rank holds of a tensor of the model."""

import math
from dataclasses import dataclass
from functools import cached_property

from shardwright.config.nf4_rows import Nf4Row, RowFormat

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterShard:
    """A rank's part of a tensor.

    `box` has a half-open range for each dim of `full_shape`. `sharded_over` names the axes that cut the tensor; over
    all other axes it is replicated. `summed_over` names axes whose ranks each compute only a part of the gradient of a
    replicated parameter (a norm under sequence parallel), so that the parts must be summed. An expert's parameter has
    other ranks as replicas than the rest of the layer (sharding/mesh.py).
    """

    full_shape: tuple[int, ...]
    box: Box
    init: str  # "normal", "zeros" or "ones"
    std: float = 0.0
    name: str = ""
    sharded_over: tuple[str, ...] = ()
    summed_over: tuple[str, ...] = ()
    is_expert: bool = False
    num_parts: int = 1  # parts that the axes cut the tensor into; their sizes may be unequal
    is_tied: bool = False  # the same tensor has another use, on the first or the last stage
    is_frozen: bool = False  # it has values alone, which no step changes
    row_format: RowFormat = ""  # of a frozen matrix: how its rows are stored
    is_exact: bool = False  # computed with in float32, whatever the dtype of the computation

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the full tensor."""
        return tuple(slice(start, stop) for start, stop in self.box)

    @cached_property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def nf4_row(self) -> Nf4Row | None:
        """The words of a row of the box; None if elements are stored as numbers."""
        if not self.row_format:
            return None
        return Nf4Row(*self.box[-1], self.full_shape[-1], is_double=self.row_format == "nf4-double")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the box in memory: of its elements, or of the words of its rows."""
        row = self.nf4_row
        return self.shape if row is None else (*self.shape[:-1], row.num_words)

    @property
    def num_words(self) -> int:
        """Words of the box in NF4."""
        return math.prod(self.stored_shape)

    @property
    def is_put_off(self) -> bool:
        """True if a split backward computes its gradient in W: parameters of layers, and of modules for further tokens.
        The embedding's gradient is no matrix product, and the head's is computed with the loss."""
        return self.name.startswith(("layers.", "mtp."))

    @property
    def mean_elements(self) -> float:
        """Mean elements of a part: the same number on every rank, whichever part it holds."""
        return math.prod(self.full_shape) / self.num_parts
