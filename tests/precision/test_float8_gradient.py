"""Weight gradients in fp8: their errors are those of casts along tokens, whatever x was kept as."""

import numpy as np
import pytest
import torch
from torch import Tensor

from float8_reference import random, rounding_bound, scales_by_element
from shardwright.precision.float8 import E4M3, along_columns, quantise
from shardwright.precision.float8_gradient import OperandScales, gradient_blocks, rows_of_block, tensor_scale
from shardwright.precision.float8_linear import forward_and_cast, input_gradient_and_cast, make_float8_state
from shardwright.precision.float8_product import dequantise
from shardwright.precision.float8_recipe import RECIPES, RecipeName

T, N, K = 200, 144, 272


def gradient(name: RecipeName, dy: Tensor, x: Tensor, keeps_cast: bool) -> Tensor:
    """dy^T x as a layer computes it."""
    state = make_float8_state(name)
    weight = random(N, K, seed=3)
    _, x_cast = forward_and_cast(state, x, weight)
    _, dy_cast = input_gradient_and_cast(state, dy, weight)
    scales = OperandScales(tensor_scale(dy_cast), tensor_scale(x_cast))
    kept = dequantise(x_cast, x.dtype) if keeps_cast else x
    found = torch.full((N, K), torch.nan)
    for rows, block in gradient_blocks(state.recipe, dy, kept, scales):
        assert block.dtype == torch.float32
        found[rows] = block
    return found


@pytest.mark.parametrize("keeps_cast", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(RECIPES))
def test_errors_are_those_of_the_casts(name: RecipeName, wide: torch.dtype, keeps_cast: bool) -> None:
    """Of x kept in fp8 two casts, one along the inputs and one along the tokens."""
    recipe, x, dy = RECIPES[name], random(T, K).to(wide), random(T, N, seed=1).to(wide)
    a, b = dy.t().double().numpy(), x.t().double().numpy()
    error_a = rounding_bound(a, scales_by_element(a, recipe.activation, recipe.gradient_dtype), recipe.gradient_dtype)
    error_b = rounding_bound(b, scales_by_element(b, recipe.activation, E4M3), E4M3)
    if keeps_cast:
        first = rounding_bound(b.T, scales_by_element(b.T, recipe.activation, E4M3), E4M3).T
        error_b = 2 * np.maximum(first, error_b) + first * 2.0**-4
    bound = error_a @ np.abs(b).T + np.abs(a) @ error_b.T + error_a @ error_b.T
    error = np.abs(gradient(name, dy, x, keeps_cast).double().numpy() - a @ b.T)
    assert (error <= 1.001 * bound).all()
    assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(a @ b.T) < 0.1


@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_what_was_cast_is_cast_again_without_rounding(granularity: str) -> None:
    """Scales are powers of two: what a matrix stands for in fp8 has itself as what it stands for."""
    once = dequantise(quantise(random(T, K), granularity, E4M3), torch.bfloat16)  # type: ignore[arg-type]
    again = dequantise(quantise(once, granularity, E4M3), torch.bfloat16)  # type: ignore[arg-type]
    assert torch.equal(once, again)


def test_a_transpose_is_filled_up_for_a_device() -> None:
    x = torch.empty(T, K, device="meta")
    assert along_columns(x, "tile", E4M3, None).values.shape == (K, 256)
    assert along_columns(x, "tensor", E4M3, torch.ones((), device="meta")).values.shape == (K, 256)


def test_blocks_are_small_and_whole_tiles() -> None:
    assert rows_of_block(7168) == 1152  # of 32 MiB in float32
    assert rows_of_block(10**6) == 128
