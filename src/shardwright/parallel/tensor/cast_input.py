"""A product's input in fp8, kept instead of 16 bits if the weight's gradient is computed from fp8 as well.

The kept cast is the operand of the forward's product. If other code keeps the input anyway, or the input is recomputed,
it is cast again in the backward as in the forward.
"""

from typing import Any

from torch import Tensor

from shardwright.parallel.tensor.recomputed_input import InputRecipe, keep_input, kept_input
from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_gradient import cast_as_before, tensor_scale


def keep_input_or_cast(
    ctx: Any, x: Tensor, recipe: InputRecipe | None, cast: Quantised | None, owns_input: bool
) -> None:
    """Keep `x`, or the recipe that recomputes it, or its `cast` if that is given and nothing else keeps x."""
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
    """The input in fp8, as the matrix [tokens, inputs]. For the backward of an autograd function that called
    `keep_input_or_cast`."""
    granularity: Granularity = ctx.granularity
    if ctx.keeps_cast:
        values, scales = ctx.saved_tensors
        return Quantised(values, scales, granularity)
    return cast_as_before(kept_input(ctx).flatten(0, -2), granularity, ctx.scale)


def own_part(matrix: Quantised, size: int, index: int) -> Quantised:
    """The rows of rank `index` of `size` ranks, copied to memory of their own."""
    if size == 1:
        return matrix
    num_rows = matrix.values.shape[0] // size
    rows = slice(index * num_rows, (index + 1) * num_rows)
    scales = matrix.scales if matrix.granularity == "tensor" else matrix.scales[rows].clone()
    return Quantised(matrix.values[rows].clone(), scales, matrix.granularity)
