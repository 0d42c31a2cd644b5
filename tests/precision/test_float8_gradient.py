"""Weight gradients in fp8: their errors are those of casts along tokens, whatever x was kept as."""

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.precision.float8 import DTYPES, E4M3, Granularity, Quantised, quantise
from shardwright.precision.float8_gradient import (
    along_columns,
    cast_as_before,
    gradient_blocks,
    rows_of_block,
    tensor_scale,
)
from shardwright.precision.float8_linear import forward_and_cast, input_gradient_and_cast, make_float8_state
from shardwright.precision.float8_product import dequantise
from support.float8_reference import Numbers, random, rounding_bound, scales_by_element

T, N, K = 200, 144, 272


def gradient(name: str, dy: Tensor, x: Tensor, is_kept: bool) -> Tensor:
    """dy^T x as a layer computes it, which keeps x in fp8 or casts it again."""
    state = make_float8_state(name)
    weight = random(N, K, seed=3)
    _, x_cast = forward_and_cast(state, x, weight)
    _, dy_cast = input_gradient_and_cast(state, dy, weight)
    again = x_cast if is_kept else cast_as_before(x, x_cast.granularity, tensor_scale(x_cast))
    result = torch.full((N, K), torch.nan)
    for rows, block in gradient_blocks(dy_cast, again):
        assert block.dtype == torch.float32
        result[rows] = block
    return result


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FLOAT8_RECIPES))
def test_errors_are_those_of_the_casts(name: str, wide: torch.dtype) -> None:
    """Of each operand two: along the dim of the other products, and along the tokens."""
    recipe, x, dy = FLOAT8_RECIPES[name], random(T, K).to(wide), random(T, N, seed=1).to(wide)

    def error_of(matrix: Tensor, dtype: torch.dtype) -> tuple[Numbers, Numbers]:
        of = matrix.double().numpy()
        first = rounding_bound(of, scales_by_element(of, recipe.activation, dtype), dtype)
        second = rounding_bound(of.T, scales_by_element(of.T, recipe.activation, dtype), dtype)
        # An element that is rounded a second time may have become larger by the first, and its scale twice as large.
        return of.T, first.T + 2 * second + first.T * 2.0**-2

    (a, error_a), (b, error_b) = error_of(dy, DTYPES[recipe.gradient]), error_of(x, E4M3)
    bound = error_a @ np.abs(b).T + np.abs(a) @ error_b.T + error_a @ error_b.T
    result = gradient(name, dy, x, is_kept=True)
    error = np.abs(result.double().numpy() - a @ b.T)
    assert (error <= 1.001 * bound).all()
    assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(a @ b.T) < 0.1
    assert torch.equal(result, gradient(name, dy, x, is_kept=False))


@pytest.mark.parametrize("granularity", ["row", "tile"])
def test_what_was_cast_is_cast_again_without_rounding(granularity: Granularity) -> None:
    """Scales are powers of two: what a matrix stands for in fp8 has itself as what it stands for."""
    once = dequantise(quantise(random(T, K), granularity, E4M3), torch.bfloat16)
    again = dequantise(quantise(once, granularity, E4M3), torch.bfloat16)
    assert torch.equal(once, again)


@pytest.mark.parametrize("granularity", ["row", "tile", "tensor"])
def test_a_transpose_is_filled_up_for_a_device(granularity: Granularity) -> None:
    scales = torch.ones((), device="meta") if granularity == "tensor" else torch.ones(T, 1, device="meta")
    scales = torch.ones(T, 3, device="meta") if granularity == "tile" else scales
    x = Quantised(torch.empty(T, K, device="meta", dtype=E4M3), scales, granularity)
    assert along_columns(x).values.shape == (K, 256)


def test_blocks_are_small_and_whole_tiles() -> None:
    assert rows_of_block(7168) == 1152  # of 32 MiB in float32
    assert rows_of_block(10**6) == 128
