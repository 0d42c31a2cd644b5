"""Casts to fp8 and back as a device's compiler takes them: the same bits as in turn, for scales are powers of two."""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.precision import float8, float8_product
from shardwright.precision.float8 import E4M3, E5M2, Granularity, quantise
from shardwright.precision.fused_operator import compiled

pytestmark = pytest.mark.long

SHAPES = [(5, 37), (130, 129)]
DTYPES = {"tensor": torch.float32, "row": torch.float32, "tile": torch.bfloat16, "block": torch.float32}
# One graph, with no call back into Python, for all sizes.
whole = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True)


def same_bits(values: Tensor, expected: Tensor) -> bool:
    return torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("granularity", "kind"), [("row", E4M3), ("tile", E5M2), ("block", E4M3)])
def test_quantise_and_back(granularity: Granularity, kind: torch.dtype) -> None:
    torch.compiler.reset()  # code that other tests compiled counts against a limit
    there, back = whole(float8._quantise_at_once), whole(float8_product._dequantise_at_once)
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(3.0).to(DTYPES[granularity])
        expected = quantise(x, granularity, kind)
        values, scales = torch.empty_like(expected.values), torch.empty_like(expected.scales)
        there(x, granularity, values, scales)
        assert same_bits(values, expected.values)
        assert torch.equal(scales, expected.scales)
        wide = torch.empty(shape)
        back(values, scales, granularity, wide)
        assert torch.equal(wide, float8_product.dequantise(expected, torch.float32))


@pytest.mark.parametrize("granularity", DTYPES)
def test_cast_with_given_scales(granularity: Granularity) -> None:
    """Numbers that the scales are too small for saturate."""
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(2))
    scales = float8.scales_for(float8.amaxes(x, granularity), E4M3) / 4
    expected = float8.cast(x, granularity, E4M3, scales)
    values = torch.empty_like(expected.values)
    compiled(float8._cast_at_once, "aot_eager")(x, scales, granularity, values)
    assert same_bits(values, expected.values)
