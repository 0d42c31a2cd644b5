"""The recipes of fp8 training: what shares a scale, and where the scale comes from.

The products y = x W^T and dx = dy W are in fp8, and where it is asked for the weight gradient dy^T x. x and W are e4m3.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from shardwright.precision.float8 import E4M3, E5M2, Granularity

RecipeName = Literal["delayed", "tensorwise", "rowwise", "blockwise"]


@dataclass(frozen=True)
class Float8Recipe:
    """`activation` is the granularity of x and dy, `weight` that of W; `delayed` takes scales from past steps."""

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
        # A scale for each token and each output. Gradients stay e5m2, as above: a row of dy is all the outputs of a
        # token, whose range a scale for the row does not narrow.
        Float8Recipe("rowwise", "row", "row", E5M2),
        # DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437, section 3.3): tiles are small enough for e4m3 everywhere.
        Float8Recipe("blockwise", "tile", "block", E4M3),
    )
}
