"""The recipes of fp8 training: the granularity of scales, and their origin.

The products y = x W^T and dx = dy W are in fp8, and on request the weight gradient dy^T x too. x and W are e4m3.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from shardwright.precision.float8 import E4M3, E5M2, Granularity

RecipeName = Literal["delayed", "tensorwise", "rowwise", "blockwise"]


@dataclass(frozen=True)
class Float8Recipe:
    """A recipe. `activation` is the granularity of x and dy, `weight` that of W; `delayed` uses scales of past
    steps."""

    name: RecipeName
    activation: Granularity
    weight: Granularity
    gradient_dtype: torch.dtype
    delayed: bool = False


RECIPES: dict[RecipeName, Float8Recipe] = {
    recipe.name: recipe
    for recipe in (
        # Micikevicius et al. 2022 (arXiv 2209.05433, section 3): a scale for each tensor; gradients in e5m2.
        Float8Recipe("tensorwise", "tensor", "tensor", E5M2),
        # The recipe of NVIDIA's Transformer Engine ("delayed scaling", format "hybrid": e4m3, and e5m2 for gradients).
        Float8Recipe("delayed", "tensor", "tensor", E5M2, delayed=True),
        # A scale for each token and each output. Gradients stay e5m2, as above: a row of dy has all outputs of a token,
        # and a scale for the row does not narrow their range.
        Float8Recipe("rowwise", "row", "row", E5M2),
        # DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437, section 3.3): tiles are small enough for e4m3 everywhere.
        Float8Recipe("blockwise", "tile", "block", E4M3),
    )
}
