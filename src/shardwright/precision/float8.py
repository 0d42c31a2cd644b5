"""Numbers of 8 bits and the scales that they need: how a matrix is cast to fp8 and what it stands for.

Micikevicius et al. 2022 (arXiv 2209.05433): e4m3 (largest 448, 3 bits of fraction) for activations and weights, e5m2
(largest 57344, 2 bits) for gradients, whose range is wider. Neither reaches far enough by itself, so a matrix is
divided by scales before the cast: by one, by one a row, or by one a tile or block of 128 (`Granularity`).

Scales are powers of two, rounded up. Then dividing by them rounds nothing, the same weights can be used transposed,
and a product may apply its scales before or after the sum with the same result. What it costs is at most one binade
of a range of 18 or more. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) does so where a matrix is needed transposed.

The values saturate. An infinity or a nan instead makes every scale that it takes part in nan, so that all that is
computed from it is nan: an overflow must be seen, not clamped to the largest number.

Shape suffixes: R rows, C columns (the dim that a product contracts), r and c are R / 128 and C / 128 rounded up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.config.precision import FLOAT8_TILE as TILE
from shardwright.precision.fused_operator import fused_operator

# What shares a scale: all elements, a row, 128 neighbours of a row, or a square of 128 x 128.
Granularity = Literal["tensor", "row", "tile", "block"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

# Which rows the groups of a matrix have: neighbours, in the order of the groups. One without rows is left out.
Ranges = Sequence[tuple[int, slice]]

# Below this an amax counts as this: the reciprocal of a scale must be finite, and a matrix of zeros has a scale too.
_SMALLEST_AMAX = 2.0**-100
# Elements that are worked on at a time: on a device, so that what is made meanwhile is small. On a CPU all at once is 3
# to 7 times slower for a matrix of 4096 x 4096, whose temporaries are fetched from the system each time; fewer are up
# to 15% slower for the calls that they cost.
_CHUNK_ELEMENTS, _CPU_CHUNK_ELEMENTS = 1 << 24, 1 << 18


@dataclass(frozen=True)
class Quantised:
    """A matrix in fp8: what it stands for is values x scales.

    `values` is [R, C], e4m3 or e5m2. `scales` is float32: [] for "tensor", [R, 1] for "row", [R, c] for "tile", [r, c]
    for "block".
    """

    values: Tensor
    scales: Tensor
    granularity: Granularity


def amaxes(x_RC: Tensor, granularity: Granularity) -> Tensor:
    """Largest absolute values, float32, in the shape of the scales; nan where there is a nan."""
    if granularity == "tensor" and x_RC.numel():
        low, high = torch.aminmax(x_RC)  # one pass, where abs().amax() makes a copy first
        return torch.maximum(-low, high).float()
    if granularity == "tensor":
        return torch.zeros((), device=x_RC.device)
    if not x_RC.shape[0]:
        return _no_scales(x_RC, granularity)
    return torch.cat([_amaxes_of_chunk(x_RC[rows].float(), granularity) for rows in _chunks(x_RC)])


def scales_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest powers of two by which numbers up to `amax` can be divided to fit in `dtype`; nan if not finite."""
    ratio = amax.float().clamp(min=_SMALLEST_AMAX) / LARGEST[dtype]
    # The bits of a float32 less its fraction are the power of two below it; add all but one bit to get that above.
    above = ((ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return above + amax * 0.0


def quantise(x_RC: Tensor, granularity: Granularity, dtype: torch.dtype) -> Quantised:
    """Cast with scales from the matrix itself (current scaling).

    Scales smaller than the matrix are found and used while a part of it is in the cache: for rows 20% faster than
    `amaxes` and then `cast`, for tiles 10%.
    """
    if granularity == "tensor" or not x_RC.shape[0]:
        return cast(x_RC, granularity, dtype, scales_for(amaxes(x_RC, granularity), dtype))
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    high, wide = _group_of(granularity, x_RC.shape[1])
    scales = x_RC.new_empty(math.ceil(x_RC.shape[0] / high), math.ceil(x_RC.shape[1] / wide), dtype=torch.float32)
    _quantise(x_RC, granularity, values_RC, scales)
    return Quantised(values_RC, scales, granularity)


def cast(x_RC: Tensor, granularity: Granularity, dtype: torch.dtype, scales: Tensor) -> Quantised:
    """Cast with given scales; what they are too small for saturates.

    They must be nan wherever the matrix is not finite. Those from its own amaxes are; to others add amax x 0.
    """
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    _cast(x_RC, scales, granularity, values_RC)
    return Quantised(values_RC, scales, granularity)


def cast_groups(x_RC: Tensor, ranges: Ranges, dtype: torch.dtype, scales_g: Tensor) -> Tensor:
    """The values of a matrix some of whose rows have a scale together, [R, C]: group g has those that `ranges` says."""
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    for group, of_group in ranges:
        _cast(x_RC[of_group], scales_g[group], "tensor", values_RC[of_group])
    return values_RC


def transposed(matrix: Quantised) -> Quantised:
    """The transpose, with its own rows contiguous. Only where one scale serves both directions."""
    assert matrix.granularity in ("tensor", "block"), f"a scale a {matrix.granularity} is for one direction"
    bytes_CR = matrix.values.view(torch.uint8).t().contiguous()
    return Quantised(bytes_CR.view(matrix.values.dtype), matrix.scales.t(), matrix.granularity)


def spread(x_RC: Tensor, scales: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """A matrix and its scales in shapes that can be multiplied: views, where the matrix is of whole tiles or blocks."""
    if granularity in ("tensor", "row"):
        return x_RC, scales
    num_rows, num_columns = x_RC.shape
    if granularity == "tile" and num_columns % TILE == 0 and x_RC.is_contiguous():
        return x_RC.view(num_rows, num_columns // TILE, TILE), scales[:, :, None]
    if num_columns % TILE == num_rows % TILE == 0 and granularity == "block" and x_RC.is_contiguous():
        return x_RC.view(num_rows // TILE, TILE, num_columns // TILE, TILE), scales[:, None, :, None]
    return x_RC, expanded(scales, granularity, x_RC.shape)


def expanded(scales: Tensor, granularity: Granularity, shape: torch.Size) -> Tensor:
    """Scales in a shape that a matrix of `shape` can be multiplied with."""
    if granularity in ("tensor", "row"):
        return scales
    num_rows, num_columns = shape
    r, c = scales.shape
    high = TILE if granularity == "block" else 1
    return scales[:, None, :, None].expand(r, high, c, TILE).reshape(r * high, c * TILE)[:num_rows, :num_columns]


def _amaxes_of_chunk(x_RC: Tensor, granularity: Granularity) -> Tensor:
    num_rows, num_columns = x_RC.shape
    if granularity == "row":
        return x_RC.abs().amax(1, keepdim=True)
    high = TILE if granularity == "block" else 1
    missing = (0, -num_columns % TILE, 0, -num_rows % high)
    padded = functional.pad(x_RC, missing) if any(missing) else x_RC
    return padded.abs().view(-1, high, padded.shape[1] // TILE, TILE).amax((1, 3))


def _group_of(granularity: Granularity, num_columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return TILE if granularity == "block" else 1, num_columns if granularity == "row" else TILE


def _no_scales(x_RC: Tensor, granularity: Granularity) -> Tensor:
    wide = 1 if granularity == "row" else math.ceil(x_RC.shape[1] / TILE)
    return torch.zeros(0, wide, device=x_RC.device)


def _store(values: Tensor, x_RC: Tensor, scales: Tensor, granularity: Granularity) -> None:
    # The cast itself saturates on some devices and gives nan or infinity on others.
    largest = LARGEST[values.dtype]
    x, spread_scales = spread(x_RC, scales, granularity)
    values.copy_((x * spread_scales.reciprocal()).clamp_(-largest, largest).view(values.shape))


def _rows_of(scales: Tensor, granularity: Granularity, rows: slice) -> Tensor:
    if granularity == "tensor":
        return scales
    high = TILE if granularity == "block" else 1
    return scales[rows.start // high : math.ceil(rows.stop / high)]


def _chunks(x_RC: Tensor) -> Iterator[slice]:
    """Rows that are worked on together: on a CPU what stays in its cache. Whole blocks."""
    num_rows, num_columns = x_RC.shape
    elements = _CPU_CHUNK_ELEMENTS if x_RC.device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(TILE, elements // max(1, num_columns) // TILE * TILE)
    for first in range(0, num_rows, max(1, step)):
        yield slice(first, min(first + step, num_rows))


def _quantise_in_turn(x_RC: Tensor, granularity: Granularity, values_RC: Tensor, scales: Tensor) -> None:
    for rows in _chunks(x_RC):
        chunk, of_chunk = x_RC[rows].float(), _rows_of(scales, granularity, rows)
        of_chunk.copy_(scales_for(_amaxes_of_chunk(chunk, granularity), values_RC.dtype))
        _store(values_RC[rows], chunk, of_chunk, granularity)


def _quantise_at_once(x_RC: Tensor, granularity: Granularity, values_RC: Tensor, scales: Tensor) -> None:
    x = x_RC.float()
    found = scales_for(_amaxes_of_chunk(x, granularity), values_RC.dtype)
    scales.copy_(found)
    _store(values_RC, x, found, granularity)


def _cast_in_turn(x_RC: Tensor, scales: Tensor, granularity: Granularity, values_RC: Tensor) -> None:
    for rows in _chunks(x_RC):
        _store(values_RC[rows], x_RC[rows].float(), _rows_of(scales, granularity, rows), granularity)


def _cast_at_once(x_RC: Tensor, scales: Tensor, granularity: Granularity, values_RC: Tensor) -> None:
    _store(values_RC, x_RC.float(), scales, granularity)


_quantise = fused_operator(
    "quantise(Tensor x, str granularity, Tensor(a!) values, Tensor(b!) scales) -> ()",
    _quantise_in_turn,
    _quantise_at_once,
)
_cast = fused_operator(
    "cast(Tensor x, Tensor scales, str granularity, Tensor(a!) values) -> ()", _cast_in_turn, _cast_at_once
)
