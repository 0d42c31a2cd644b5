"""How a matrix product gets its input back in the backward: it was kept, or it is made again.

A product needs its input for the weight's gradient. Where that input is the result of a region that is recomputed,
keeping it would give away most of what recomputation saves. Then the input comes with a recipe, the product keeps what
that says instead, and the recipe makes the input again.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class InputRecipe(Protocol):
    """Makes a product's input again."""

    def keep(self) -> tuple[Tensor, ...]:
        """The tensors that the product's autograd node must keep until then. Called once, in the forward."""

    def make(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The input, with the same bits as in the forward. Called once, in the backward."""


class Remade(NamedTuple):
    """The input of a matrix product that is not kept: its values now, and what makes them again in the backward."""

    values: Tensor
    recipe: InputRecipe


ProductInput = Tensor | Remade


def values_and_recipe(x: ProductInput) -> tuple[Tensor, InputRecipe | None]:
    """The values of a product's input, and what makes them again if they are not kept."""
    return x if isinstance(x, Remade) else (x, None)


def keep_input(ctx: Any, x: Tensor, recipe: InputRecipe | None) -> None:
    """Remember `x`, or how to make it, in the forward of an autograd function."""
    ctx.recipe = recipe
    ctx.save_for_backward(*((x,) if recipe is None else recipe.keep()))


def kept_input(ctx: Any) -> Tensor:
    """The input that `keep_input` remembered, in the backward of that function."""
    kept: tuple[Tensor, ...] = ctx.saved_tensors
    recipe: InputRecipe | None = ctx.recipe
    return kept[0] if recipe is None else recipe.make(kept)
