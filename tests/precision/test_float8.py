"""fp8 numbers: casts and scales against plain loops, products against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.precision.float8 import (
    E4M3,
    E5M2,
    LARGEST,
    Granularity,
    Quantised,
    amaxes,
    cast,
    expanded,
    quantise,
    scales_for,
    transposed,
)
from shardwright.precision.float8_product import dequantise, emulated_product, product
from shardwright.precision.scaled_mm import has_right_sizes, has_scaled_product, scaled_product
from support.float8_reference import (
    FORMATS,
    codes,
    positive_numbers,
    random,
    rounded_codes,
    scale_for,
    scales_by_element,
)

GRANULARITIES: list[Granularity] = ["tensor", "row", "tile", "block"]
DTYPES = list(FORMATS)


def scale_of_each(matrix: Quantised) -> np.ndarray:
    scales = expanded(matrix.scales, matrix.granularity, matrix.values.shape)
    return scales.expand(matrix.values.shape).double().numpy()


# --- casts and scales ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(dtype: torch.dtype) -> None:
    table = positive_numbers(dtype)
    middles = (table[1:] + table[:-1]) / 2
    near = np.concatenate(
        [table, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), table[-1:] * [[1.01, 1.1, 99.0]]], None
    )
    x = np.concatenate([near, -near]).astype(np.float32)[None]
    cast_x = cast(torch.from_numpy(x), "tensor", dtype, torch.ones(()))
    assert (codes(cast_x) == rounded_codes(x.astype(np.float64), dtype)).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (130, 300), (256, 256), (700, 600)])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
def test_quantise(granularity: Granularity, dtype: torch.dtype, shape: tuple[int, int], wide: torch.dtype) -> None:
    x = random(*shape).to(wide)
    result = quantise(x, granularity, dtype)
    exact = x.double().numpy()
    scales = scales_by_element(exact, granularity, dtype)
    assert result.values.dtype == dtype
    assert (scale_of_each(result) == scales).all()
    assert (codes(result) == rounded_codes(exact / scales, dtype)).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cast_with_the_amaxes_is_quantise(granularity: Granularity) -> None:
    x = random(300, 1000)[:, ::2]  # more than one chunk, and not contiguous
    both = quantise(x, granularity, E4M3), cast(x, granularity, E4M3, scales_for(amaxes(x, granularity), E4M3))
    assert torch.equal(both[0].scales, both[1].scales)
    assert (codes(both[0]) == codes(both[1])).all()


@given(st.floats(0, 2.0**120, width=32), st.sampled_from(DTYPES))
def test_scales(amax: float, dtype: torch.dtype) -> None:
    assert float(scales_for(torch.tensor(amax), dtype)) == scale_for(amax, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_where_they_change(dtype: torch.dtype) -> None:
    for power in range(-60, 60):
        edge = np.float32(LARGEST[dtype] * 2.0**power)
        for amax in (edge, np.nextafter(edge, np.float32(np.inf)), np.nextafter(edge, np.float32(0))):
            assert float(scales_for(torch.tensor(amax), dtype)) == scale_for(float(amax), dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_columns", [128, 258])
def test_no_rows(granularity: Granularity, num_columns: int) -> None:
    """An expert, or a rank of experts, to which no token comes."""
    result = quantise(torch.zeros(0, num_columns, dtype=torch.bfloat16), granularity, E4M3)
    assert dequantise(result, torch.bfloat16).shape == (0, num_columns)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros(granularity: Granularity) -> None:
    zeros = quantise(torch.zeros(130, 140), granularity, E4M3)
    assert torch.isfinite(zeros.scales).all()
    assert torch.equal(dequantise(zeros, torch.float32), torch.zeros(130, 140))
    some = quantise(random(7, 140), "tile" if granularity == "block" else granularity, E4M3)
    assert torch.equal(product(some, zeros, torch.float32), torch.zeros(7, 130))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_not_finite_is_seen(granularity: Granularity, wide: torch.dtype, bad: float) -> None:
    x = random(200, 300).to(wide)
    x[150, 200] = bad
    result = dequantise(quantise(x, granularity, E4M3), torch.float32).isnan()
    spoilt = torch.zeros(200, 300, dtype=torch.bool)
    spoilt[
        {
            "tensor": np.s_[:, :],
            "row": np.s_[150:151, :],
            "tile": np.s_[150:151, 128:256],
            "block": np.s_[128:, 128:256],
        }[granularity]
    ] = True
    assert torch.equal(result, spoilt)


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_transposed(granularity: Granularity) -> None:
    matrix = quantise(random(130, 300), granularity, E4M3)
    turned = transposed(matrix)
    assert turned.values.is_contiguous()
    assert torch.equal(dequantise(turned, torch.float32), dequantise(matrix, torch.float32).t())


# --- products ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**60])
def test_every_number_is_widened_exactly(dtype: torch.dtype, wide: torch.dtype, scale: float) -> None:
    table = positive_numbers(dtype)
    all_codes = np.concatenate([np.arange(len(table)), 128 + np.arange(len(table))]).astype(np.uint8)[None]
    matrix = Quantised(torch.from_numpy(all_codes).view(dtype), torch.tensor(scale), "tensor")
    assert (dequantise(matrix, wide).double().numpy() == np.concatenate([table, -table])[None] * scale).all()


PAIRS: list[tuple[Granularity, Granularity, torch.dtype]] = [
    ("tensor", "tensor", E4M3),
    ("tensor", "tensor", E5M2),
    ("row", "row", E4M3),
    ("row", "row", E5M2),
    ("tile", "block", E4M3),
]


def by_parts_of_128(a: Quantised, b: Quantised) -> tuple[np.ndarray, np.ndarray]:
    """a b^T in float64 the way tensor cores go: a partial sum of the values for each 128, times the scales; and the
    sum of the sizes of all terms."""
    tables = [
        np.concatenate([t, np.zeros(128 - len(t)), -t, np.zeros(128 - len(t))])
        for t in (positive_numbers(a.values.dtype), positive_numbers(b.values.dtype))
    ]
    values_a, values_b = tables[0][codes(a)], tables[1][codes(b)]
    scales_a, scales_b = scale_of_each(a), scale_of_each(b)
    total = np.zeros((len(values_a), len(values_b)))
    sizes = np.zeros_like(total)
    for first in range(0, values_a.shape[1], 128):
        part = np.s_[:, first : first + 128]
        scale = np.outer(scales_a[:, first], scales_b[:, first])
        total += values_a[part] @ values_b[part].T * scale
        sizes += np.abs(values_a[part]) @ np.abs(values_b[part]).T * scale
    return total, sizes


@pytest.mark.parametrize(("granularity_a", "granularity_b", "dtype"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 130, 300), (64, 128, 256)])
def test_emulation_is_exact_but_for_float32_sums(
    granularity_a: Granularity, granularity_b: Granularity, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    num_a, num_b, num_columns = shape
    a = quantise(random(num_a, num_columns), granularity_a, dtype)
    b = quantise(random(num_b, num_columns, seed=1), granularity_b, E4M3)
    exact, sizes = by_parts_of_128(a, b)
    # Each of n additions is off by at most 2^-24 of what was summed so far (Higham 2002, section 3.1).
    bound = num_columns * 2.0**-24 * sizes
    result = emulated_product(a, b, torch.float32).double().numpy()
    assert (np.abs(result - exact) <= bound).all()
    result = emulated_product(a, b, torch.bfloat16).double().numpy()
    # The sums of bf16 instructions may round down: twice as much. Then once to bf16.
    assert (np.abs(result - exact) <= 2 * bound + np.abs(exact) * 2.0**-8).all()
    assert torch.equal(emulated_product(a, b, torch.float16), emulated_product(a, b, torch.float32).half())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 has scaled_mm on CUDA alone")
@pytest.mark.parametrize(("granularity_a", "granularity_b", "dtype"), PAIRS[:4])
def test_emulation_is_what_scaled_mm_gives(
    granularity_a: Granularity, granularity_b: Granularity, dtype: torch.dtype
) -> None:
    a = quantise(random(48, 160), granularity_a, dtype)
    b = quantise(random(96, 160, seed=1), granularity_b, E4M3)
    assert not has_scaled_product(a, b)  # it has one, but a slow one
    _, sizes = by_parts_of_128(a, b)
    difference = scaled_product(a, b, torch.float32) - product(a, b, torch.float32)
    assert (difference.double().numpy() <= 2 * 160 * 2.0**-24 * sizes).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("granularity_a", "granularity_b", "dtype"), PAIRS)
def test_emulation_is_what_the_device_gives(
    granularity_a: Granularity, granularity_b: Granularity, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    host = quantise(random(100, 528), granularity_a, dtype), quantise(random(272, 528, seed=1), granularity_b, E4M3)
    a = quantise(random(100, 528).cuda(), granularity_a, dtype)
    b = quantise(random(272, 528, seed=1).cuda(), granularity_b, E4M3)
    for here, there in zip(host, (a, b), strict=True):
        assert torch.equal(here.scales, there.scales.cpu())
        assert (codes(here) == codes(there)).all()
    if not has_scaled_product(a, b):
        pytest.skip("this device has no such product")
    exact, sizes = by_parts_of_128(*host)
    # A tensor core adds 32 products at a time with at least 14 bits, and those sums in float32.
    bound = 2.0**-13 * sizes + np.abs(exact) * (2.0**-8 if out_dtype == torch.bfloat16 else 0.0)
    for result in (product(a, b, out_dtype), emulated_product(a, b, out_dtype)):
        assert result.dtype == out_dtype
        assert (np.abs(result.cpu().double().numpy() - exact) <= bound).all()


def test_products_that_devices_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")

    class OnCuda:
        """A matrix of which only shape, dtype and device are asked."""

        def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
            self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda", 0)

    def has(a: Any, b: Any, granularity: Granularity, weight: Granularity) -> bool:
        scales = torch.ones(())
        return has_scaled_product(Quantised(a, scales, granularity), Quantised(b, scales, weight))

    weight = OnCuda((32, 64), E4M3)
    assert has(OnCuda((3, 64), E4M3), weight, "tensor", "tensor")
    assert has(OnCuda((3, 256), E4M3), OnCuda((128, 256), E4M3), "tile", "block")
    assert not has(OnCuda((3, 256), E5M2), OnCuda((128, 256), E4M3), "tile", "block")  # an H200 refused it
    assert not has(OnCuda((3, 64), E5M2), weight, "tile", "block")  # no whole tile
    assert not has(OnCuda((3, 60), E4M3), OnCuda((32, 60), E4M3), "tensor", "tensor")
    assert not has(OnCuda((3, 64), E4M3), OnCuda((31, 64), E4M3), "tensor", "tensor")
    assert not has(OnCuda((0, 64), E4M3), weight, "tensor", "tensor")
    assert not has(OnCuda((3, 64), E5M2), OnCuda((32, 64), E5M2), "tensor", "tensor")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not has(OnCuda((3, 256), E4M3), OnCuda((128, 256), E4M3), "tile", "block")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert has(OnCuda((3, 64), E4M3), weight, "tensor", "tensor")
    assert not has(OnCuda((3, 64), E4M3), weight, "row", "row")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not has(OnCuda((3, 64), E4M3), weight, "tensor", "tensor")


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 refuses shapes on devices, and none without memory")
@pytest.mark.parametrize(("granularity_a", "granularity_b"), [("tensor", "tensor"), ("row", "row"), ("tile", "block")])
@pytest.mark.parametrize("num_columns", [48, 60, 128, 512, 528, 640])
@pytest.mark.parametrize("num_b_rows", [31, 48, 256, 272])
def test_sizes_that_the_device_refuses_are_those_of_torch(
    granularity_a: Granularity, granularity_b: Granularity, num_columns: int, num_b_rows: int
) -> None:
    """torch's own check of shapes, which needs no device: what it refuses raises there."""
    a = on_meta(quantise(random(3, num_columns), granularity_a, E4M3))
    b = on_meta(quantise(random(num_b_rows, num_columns), granularity_b, E4M3))
    try:
        scaled_product(a, b, torch.bfloat16)
    except RuntimeError:
        assert not has_right_sizes(a, b)
    else:
        assert has_right_sizes(a, b)


def on_meta(matrix: Quantised) -> Quantised:
    """Of these shapes, without memory."""
    return Quantised(matrix.values.to("meta"), matrix.scales.to("meta"), matrix.granularity)
