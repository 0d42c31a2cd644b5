"""Products of fp8 matrices by the device's own instructions: torch.nn.functional.scaled_mm, public since torch 2.10.

Tensor cores multiply fp8 from compute capability 8.9 on (Ada). One scale for each row needs 9.0 (Hopper). Tiles of 128
with float32 scales exist only on 9.0, from CUDA 12.9 on: later devices have tiles of 32. A CPU has the call too, but it
runs at 70 GFLOPS, while a float32 product of the same numbers runs at 95 and a bf16 one at 190 (one core of an EPYC
with AVX512-BF16, 1024 cubed, casts included), so on a CPU it isn't used.

Shape suffixes: M and N rows of the operands, C the dim that is contracted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, scaled_mm

from shardwright.precision.float8 import E4M3, E5M2, Granularity, Quantised, Ranges

_TYPES: dict[Granularity, ScalingType] = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "tile": ScalingType.BlockWise1x128,
    "block": ScalingType.BlockWise128x128,
}
# Sizes of operands must be multiples of these: 16 for fp8 in tensor cores, 128 along each side of a tile.
_MULTIPLE, _TILE = 16, 128
_LEAST_CAPABILITY = {"tensor": (8, 9), "row": (9, 0), "tile": (9, 0)}  # by the first operand's granularity


def has_scaled_product(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> bool:
    """True if the device has this product for operands of these shapes, granularities and dtypes. Tensors without
    memory stand for those of a Hopper device."""
    if a.values.device.type == "meta":
        return _has_right_form(a, b)
    if a.values.device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(a.values.device)
    if capability < _LEAST_CAPABILITY[a.granularity]:
        return False
    if a.granularity == "tile" and (capability[0] != 9 or _cuda_version() < (12, 9)):
        return False
    if a.granularity == "row" and out_dtype == torch.float32 and (capability[0] != 9 or _cuda_version() < (12, 9)):
        return False
    return _has_right_form(a, b)


def _has_right_form(a: Quantised, b: Quantised) -> bool:
    num_wide = (a.values.dtype, b.values.dtype).count(E5M2)
    most_wide = 0 if a.granularity == "tile" else 1  # torch has tiles only for e4m3
    return has_right_sizes(a, b) and num_wide <= most_wide


def has_right_sizes(a: Quantised, b: Quantised) -> bool:
    """True if scaled products admit operands of these shapes: whole tiles, if they have tiles, and no empty operand.

    torch 2.11 to 2.14, aten/src/ATen/native/cuda/ScaledBlas.cpp: the contracted dim of tiles, and both dims of blocks,
    are multiples of 128.
    """
    (num_a_rows, num_columns), num_b_rows = a.values.shape, b.values.shape[0]
    column_multiple = _TILE if "tile" in (a.granularity, b.granularity) or b.granularity == "block" else _MULTIPLE
    row_multiple = _TILE if b.granularity == "block" else _MULTIPLE
    return num_a_rows > 0 and num_columns > 0 and num_columns % column_multiple == 0 and num_b_rows % row_multiple == 0


def scaled_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    """a b^T by the device: [M, C] and [N, C] to [M, N].

    Without the "fast" sums, which keep about 14 bits (arXiv 2412.19437, section 3.3.2).
    """
    scales = _scales_of_first(a), _TYPES[a.granularity], _scales_of_second(b), _TYPES[b.granularity]
    return scaled_mm(a.values, b.values.t(), *scales, output_dtype=out_dtype, use_fast_accum=False)


def has_scaled_grouped_product(a: Quantised, weights: Sequence[Quantised], out_dtype: torch.dtype) -> bool:
    """True if the device has one kernel for rows that each are multiplied by one of several matrices [N, C].

    torch 2.11 to 2.13 admit e4m3 on both sides with a scale for each row, and a 16-bit result, on Hopper; on other
    devices they admit tiles of 32, which are not used here.
    """
    if a.values.device.type != "cuda" or torch.version.hip is not None or a.granularity != "row":
        return False
    num_b_rows, num_columns = weights[0].values.shape
    is_narrow = a.values.dtype == weights[0].values.dtype == E4M3 and weights[0].granularity == "row"
    is_whole = a.values.shape[0] > 0 and num_columns % 16 == 0 and num_b_rows % 16 == 0
    is_hopper = torch.cuda.get_device_capability(a.values.device) == (9, 0)
    return is_narrow and is_whole and is_hopper and out_dtype == torch.bfloat16


def scaled_grouped_product(a: Quantised, weights: Sequence[Quantised], ranges: Ranges) -> Tensor:
    """Each row of a [R, C] times the transpose of its group's matrix, [R, N]. The matrices lie next to each other in
    memory."""
    values = weights[0].values
    size = (len(weights), *values.shape)
    weights_gNC = values.as_strided(size, (values.numel(), values.shape[1], 1))
    scales_gN = torch.stack([weight.scales.flatten() for weight in weights])
    ends, stop = [], 0
    stops = {group: rows.stop for group, rows in ranges}
    for group in range(len(weights)):
        stop = stops.get(group, stop)
        ends.append(stop)
    ends_g = torch.tensor(ends, dtype=torch.int32).to(values.device, non_blocking=True)
    by_row = ScalingType.RowWise
    multiply = functional.scaled_grouped_mm  # type: ignore[attr-defined]  # missing in torch's stubs
    out: Tensor = multiply(
        a.values,
        weights_gNC.transpose(1, 2),
        a.scales.flatten(),
        by_row,
        scales_gN,
        by_row,
        offs=ends_g,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return out


def _cuda_version() -> tuple[int, ...]:
    assert torch.version.cuda is not None, "a device of CUDA has been found"
    return tuple(int(part) for part in torch.version.cuda.split("."))


def _scales_of_first(a: Quantised) -> Tensor:
    return _column_major(a.scales) if a.granularity == "tile" else a.scales


def _scales_of_second(b: Quantised) -> Tensor:
    if b.granularity == "block":
        # [N / 128, C / 128], with the second dim padded to a multiple of 4, and transposed as a view. The scales of a
        # transposed matrix lie in columns, and a padding of nothing leaves them so.
        return functional.pad(b.scales, (0, -b.scales.shape[1] % 4)).contiguous().t()
    if b.granularity == "tile":
        return _column_major(b.scales)
    return b.scales.t() if b.granularity == "row" else b.scales


def _column_major(scales: Tensor) -> Tensor:
    """Scales of tiles, [M, C / 128], with the rows next to each other in memory. torch asks for stride 1 between rows
    where there is only one, too."""
    if scales.shape[0] == 1:
        return scales.contiguous().as_strided(scales.shape, (1, 1))
    return scales.t().contiguous().t()
