"""A product's input in fp8, kept in place of 16 bits where the weight's gradient is computed from fp8 as well.

What is kept is what the forward multiplied with. Where somebody else keeps the input anyway, or it is made again, it is
cast in the backward as it was then.
"""

from typing import Any

from torch import Tensor

from shardwright.parallel.tensor.recomputed_input import InputRecipe, keep_input, kept_input
from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_gradient import cast_as_before, tensor_scale


def keep_input_or_cast(
    ctx: Any, x: Tensor, recipe: InputRecipe | None, cast: Quantised | None, owns_input: bool
) -> None:
    """Remember `x`, or how to make it, or what it is in fp8 if that is given and nobody else keeps x."""
    ctx.granularity = None if cast is None else cast.granularity
    ctx.scale = tensor_scale(cast)
    ctx.keeps_cast = cast is not None and recipe is None and owns_input
    ctx.shape = x.shape
    if ctx.keeps_cast:
        assert cast is not None
        ctx.recipe = None
        ctx.save_for_backward(cast.values, cast.scales)
    else:
        keep_input(ctx, x, recipe)


def kept_cast(ctx: Any) -> Quantised:
    """The input in fp8, as the matrix [tokens, inputs], in the backward of that function."""
    granularity: Granularity = ctx.granularity
    if ctx.keeps_cast:
        values, scales = ctx.saved_tensors
        return Quantised(values, scales, granularity)
    return cast_as_before(kept_input(ctx).flatten(0, -2), granularity, ctx.scale)


def own_part(whole: Quantised, size: int, index: int) -> Quantised:
    """The rows of one of `size` ranks, in memory of their own."""
    if size == 1:
        return whole
    num_rows = whole.values.shape[0] // size
    rows = slice(index * num_rows, (index + 1) * num_rows)
    scales = whole.scales if whole.granularity == "tensor" else whole.scales[rows].clone()
    return Quantised(whole.values[rows].clone(), scales, whole.granularity)
