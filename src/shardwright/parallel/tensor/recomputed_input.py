"""The input of a matrix product in the backward: it was kept, or is recomputed.

A product needs its input for the weight's gradient. If that input is the result of a recomputed region, keeping it
would lose most of the memory that recomputation saves. Then the input has a recipe: the product keeps the tensors that
the recipe names, and the recipe recomputes the input from them.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


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
