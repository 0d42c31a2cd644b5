"""The registry of recipes of fp8 training by name, and the granularities of scales. The facts of each recipe are a
file in config/float8_recipes.

A recipe computes the products y = x W^T and dx = dy W in fp8, and on request the weight gradient dy^T x too. x and W
are e4m3. Casts with scales of each granularity are in precision/float8.py.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shardwright.config.registry import NameOf, Registry

TILE = 128  # elements of a row, or of a side of a block, that share a scale (DeepSeek-V3, section 3.3)
# The elements that share a scale: all, a row, 128 neighbours in a row, or a square of 128 x 128.
Granularity = Literal["tensor", "row", "tile", "block"]


@dataclass(frozen=True, kw_only=True)
class Float8Facts:
    """The facts of a recipe that are known without computing anything.

    - `place` orders lists of recipes.
    - `activation` is the granularity of the scales of x and dy, and `weight` that of W.
    - `gradient` is the number type of dy.
    - `delayed`: scales are taken from the largest values of past steps.
    """

    name: str
    place: int
    activation: Literal["tensor", "row", "tile"]
    weight: Granularity
    gradient: Literal["e4m3", "e5m2"]
    delayed: bool = False

    @property
    def num_weight_casts(self) -> int:
        """The number of casts of a weight: one for each product, unless a scale serves both directions."""
        return 1 if serves_both_directions(self.weight) else 2

    def weight_scales(self, rows: Any, columns: Any) -> Any:
        """The number of scales of a weight, in all of its casts. Sizes may be arrays with one entry per plan."""
        num_scales = num_scales_of(self.weight, rows, columns)
        return num_scales if self.num_weight_casts == 1 else num_scales + num_scales_of(self.weight, columns, rows)

    @property
    def shares_activation_scales(self) -> bool:
        """True if ranks of tp compute the scales of shards of x or dy together, in each step."""
        return self.activation in ("tensor", "row") and not self.delayed

    @property
    def shares_weight_scales(self) -> bool:
        """True if ranks of tp compute the scales of shards of W together, in each step."""
        return self.weight in ("tensor", "row") and not self.delayed


FLOAT8_RECIPES: Registry[Float8Facts] = Registry("an fp8 recipe", "shardwright.config.float8_recipes", Float8Facts)
NO_FLOAT8 = "none"
Float8Name = Annotated[str, NameOf(FLOAT8_RECIPES, others=(NO_FLOAT8,))]


def serves_both_directions(granularity: Granularity) -> bool:
    """True if a matrix and its transpose have the same scales."""
    return granularity in ("tensor", "block")


def num_scales_of(granularity: Granularity, rows: Any, columns: Any) -> Any:
    """The number of scales of a matrix. Sizes may be arrays with one entry per plan."""
    if granularity == "tensor":
        return 1
    if granularity == "row":
        return rows
    tiles_per_row = -(-columns // TILE)
    return rows * tiles_per_row if granularity == "tile" else -(-rows // TILE) * tiles_per_row
