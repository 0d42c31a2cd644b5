"""Casts to fp8 and back as a device's compiler takes them: the same bits as in turn, for scales are powers of two."""

from functools import partial

import pytest
import torch

from shardwright.precision import float8, float8_product
from shardwright.precision.float8 import E4M3, E5M2, Granularity, quantise
from shardwright.precision.fused_operator import compiled

SHAPES = [(5, 37), (130, 129)]


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [("row", torch.float32), ("tile", torch.bfloat16), ("block", torch.float32)],
)
def test_quantise_and_back(granularity: Granularity, dtype: torch.dtype) -> None:
    there, back = (compiled(w, "aot_eager") for w in (float8._quantise_at_once, float8_product._dequantise_at_once))
    for shape in SHAPES:
        for kind in (E4M3, E5M2):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(3.0).to(dtype)
            expected = quantise(x, granularity, kind)
            values, scales = torch.empty_like(expected.values), torch.empty_like(expected.scales)
            there(x, granularity, values, scales)
            assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(scales, expected.scales)
            wide = torch.empty(shape)
            back(values, scales, granularity, wide)
            assert torch.equal(wide, float8_product.dequantise(expected, torch.float32))


@pytest.mark.parametrize("granularity", ["tensor", "row", "tile", "block"])
def test_cast_with_given_scales(granularity: Granularity) -> None:
    """What the scales are too small for saturates; what is not finite has a scale of nan."""
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(2))
    scales = float8.scales_for(float8.amaxes(x, granularity), E4M3) / 4
    expected = float8.cast(x, granularity, E4M3, scales)
    values = torch.empty_like(expected.values)
    compiled(float8._cast_at_once, "aot_eager")(x, scales, granularity, values)
    assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("granularity", ["row", "tile", "block"])
def test_casts_are_one_graph(granularity: Granularity) -> None:
    torch.compiler.reset()  # what other tests compiled counts against a limit
    matrix = quantise(torch.ones(128, 256), granularity, E4M3)
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True)
    whole(float8._quantise_at_once)(torch.ones(128, 256), granularity, matrix.values, matrix.scales)
    whole(float8._cast_at_once)(torch.ones(128, 256), matrix.scales, granularity, matrix.values)
    wide = torch.empty(128, 256)
    whole(float8_product._dequantise_at_once)(matrix.values, matrix.scales, granularity, wide)
    assert (wide == 1.0).all()
