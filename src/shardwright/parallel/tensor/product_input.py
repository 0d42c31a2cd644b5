"""The input of a matrix product in the backward: it was kept, kept in fp8, or is recomputed.

A product needs its input for the weight's gradient. If that input is the result of a recomputed region, keeping it
would lose most of the memory that recomputation saves. Then the input has a recipe: the product keeps the tensors that
the recipe names, and the recipe recomputes the input from them.

If the weight's gradient is computed in fp8, the operand of the forward's product in fp8 is kept instead of 16 bits. If
other code keeps the input anyway, or the input is recomputed, it is cast again in the backward as in the forward.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_gradient import cast_as_before, tensor_scale


class InputRecipe(Protocol):
    """Recomputes a product's input."""

    def keep(self) -> tuple[Tensor, ...]:
        """The tensors that the product's autograd node must keep for `make`. Called once, in the forward."""

    def make(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The input, with the same bits as in the forward. Called once, in the backward."""


class Remade(NamedTuple):
    """The input of a matrix product that is not kept: its values now, and the recipe that recomputes them in the
    backward."""

    values: Tensor
    recipe: InputRecipe


ProductInput = Tensor | Remade


def values_and_recipe(x: ProductInput) -> tuple[Tensor, InputRecipe | None]:
    """The values of a product's input, and the recipe that recomputes them if they are not kept."""
    return x if isinstance(x, Remade) else (x, None)


def keep_input(ctx: Any, x: Tensor, recipe: InputRecipe | None) -> None:
    """Keep `x`, or the tensors of its recipe, in the forward of an autograd function."""
    ctx.recipe = recipe
    ctx.save_for_backward(*((x,) if recipe is None else recipe.keep()))


def kept_input(ctx: Any) -> Tensor:
    """The input that `keep_input` kept in the forward, in the backward of the same autograd function."""
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    recipe: InputRecipe | None = ctx.recipe
    return tensors[0] if recipe is None else recipe.make(tensors)


def keep_recipe(ctx: Any, recipe: InputRecipe | None) -> None:
    """Keep what a recomputed region before a frozen product needs; the product itself needs nothing."""
    ctx.recipe = recipe
    if recipe is not None:
        ctx.save_for_backward(*recipe.keep())


def make_again(ctx: Any) -> None:
    """Run the recomputed region before a frozen product again, if there is one: its backward comes next."""
    if ctx.recipe is not None:
        ctx.recipe.make(ctx.saved_tensors)


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
