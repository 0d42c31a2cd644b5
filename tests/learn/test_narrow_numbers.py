"""The formats of the figure round as the numbers do that they are called by."""

import random

import pytest
import torch

from shardwright.learn.narrow_numbers_figure import FORMATS
from shardwright.train.checkpoint.stored_weights import _FP4


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("MXFP8", torch.float8_e4m3fn)])
def test_rounding_is_that_of_torch(name: str, dtype: torch.dtype) -> None:
    one = next(one for one in FORMATS if one.name.startswith(name))
    draw = random.Random(1)
    values = [draw.gauss(0, 1) * 2.0 ** draw.randint(-9, 7) for _ in range(500)] + [0.0]
    values = torch.tensor([value for value in values if abs(value) <= one.largest]).tolist()
    assert [one.rounded(value) for value in values] == torch.tensor(values).to(dtype).float().tolist()


def test_four_bits_have_eight_magnitudes() -> None:
    narrow = [one for one in FORMATS if one.value_bits == 4]
    assert [tuple(one.magnitudes(6.0)) for one in narrow] == [_FP4, _FP4]
    assert [one.bits for one in narrow] == [4.5, 4.25]


def test_a_smaller_block_with_a_finer_scale_rounds_less() -> None:
    draw = random.Random(2)
    values = [draw.gauss(0, 1) * (30.0 if draw.random() < 0.01 else 1.0) for _ in range(4096)]
    errors = {one.name: one.scaled_error(values) for one in FORMATS}
    assert errors["bf16"] < errors["MXFP8 e4m3, 32"] < errors["NVFP4 e2m1, 16"] < errors["MXFP4 e2m1, 32"]
