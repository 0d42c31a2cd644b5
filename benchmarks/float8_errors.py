"""Errors of the three products of a layer in fp8, by recipe, against the same products in float64.

    python benchmarks/float8_errors.py

Prints the table of docs/precision.md: the norm of the error over that of the exact result. Operands are normal numbers;
in the second half one input and one output in 64 is 30 times as large as the others, as in large models.
"""

import torch
from torch import Tensor

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.precision.float8_gradient import gradient_blocks
from shardwright.precision.float8_linear import forward_and_cast, input_gradient_and_cast, make_float8_state

TOKENS, INPUTS, OUTPUTS = 2048, 1024, 1536


def operands(outliers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and dy in bf16."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, generator=generator) for shape in ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (TOKENS, OUTPUTS))
    )
    if outliers:
        x[:, ::64] *= 30
        dy[:, ::64] *= 30
    return x.bfloat16(), weight.bfloat16(), dy.bfloat16()


def errors(recipe: str, outliers: bool) -> list[float]:
    """Of y = x W^T, dx = dy W and dW = dy^T x."""
    x, weight, dy = operands(outliers)
    state = make_float8_state(recipe)
    y, x_cast = forward_and_cast(state, x.float(), weight.float())
    dx, dy_cast = input_gradient_and_cast(state, dy.float(), weight.float())
    gradient = torch.cat([block for _, block in gradient_blocks(dy_cast, x_cast)])
    a, b, c = x.double(), weight.double(), dy.double()
    return [
        float((result - exact).norm() / exact.norm())
        for result, exact in ((y, a @ b.t()), (dx, c @ b), (gradient, c.t() @ a))
    ]


def main() -> None:
    """Print the table."""
    print("| recipe | y | dx | dW | with outliers: y | dx | dW |\n| --- | --- | --- | --- | --- | --- | --- |")
    for recipe in FLOAT8_RECIPES:
        results = [*errors(recipe, outliers=False), *errors(recipe, outliers=True)]
        print(f"| `{recipe}` | " + " | ".join(f"{100 * error:.1f} %" for error in results) + " |")


if __name__ == "__main__":
    main()
