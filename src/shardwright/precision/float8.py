"""The cast of a matrix to fp8, numbers of 8 bits with scales.

Micikevicius et al. 2022 (arXiv 2209.05433): e4m3 (largest 448, 3 bits of fraction) for activations and weights, e5m2
(largest 57344, 2 bits) for gradients, whose range is wider. Neither reaches far enough by itself, so a matrix is
divided by scales before the cast: by one scale, or by one for each row, tile or block of 128 (`Granularity`).

Scales are powers of two, rounded up. So division by them is exact, the same weights can be used transposed, and a
product may apply its scales before or after the sum with the same result. The cost is at most one binade of a range of
18 or more. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) does so if a matrix is needed transposed.

The values saturate. But an infinity or a nan makes its scale nan, so that every result computed from it is nan: an
overflow must be seen, not clamped to the largest number.

Shape suffixes: R rows, C columns (the dim that a product contracts), r and c are R / 128 and C / 128 rounded up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.config.float8_facts import TILE, Granularity
from shardwright.precision.fused_operator import fused_operator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

# The groups of a matrix's rows, as (group, rows): neighbouring rows, in the order of groups, without empty groups.
Ranges = Sequence[tuple[int, slice]]

# A smaller amax counts as this one: the reciprocal of a scale must be finite, also for a matrix of zeros.
_SMALLEST_AMAX = 2.0**-100
# Elements of a chunk. On a device chunks keep temporaries small. On a CPU a matrix of 4096 x 4096 in one chunk takes 3
# to 7 times as long, since memory for temporaries is requested from the system each time; smaller chunks take up to 15%
# longer, since they need more calls.
_CHUNK_ELEMENTS, _CPU_CHUNK_ELEMENTS = 1 << 24, 1 << 18


@dataclass(frozen=True)
class Quantised:
    """A matrix in fp8, equal to values x scales.

    `values` is [R, C], e4m3 or e5m2. `scales` is float32: [] for "tensor", [R, 1] for "row", [R, c] for "tile", [r, c]
    for "block".
    """

    values: Tensor
    scales: Tensor
    granularity: Granularity


def amaxes(x_RC: Tensor, granularity: Granularity) -> Tensor:
    """Largest absolute values, float32, in the shape of the scales; nan if an element is nan."""
    if granularity == "tensor" and x_RC.numel():
        low, high = torch.aminmax(x_RC)  # one pass; abs().amax() would make a copy first
        return torch.maximum(-low, high).float()
    if granularity == "tensor":
        return torch.zeros((), device=x_RC.device)
    if not x_RC.shape[0]:
        return _no_scales(x_RC, granularity)
    return torch.cat([_amaxes_of_chunk(x_RC[rows].float(), granularity) for rows in _chunks(x_RC)])


def scales_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest powers of two by which numbers up to `amax` can be divided to fit in `dtype`; nan if not finite."""
    ratio = amax.float().clamp(min=_SMALLEST_AMAX) / LARGEST[dtype]
    # A float32 without its fraction bits is the power of two below it; adding the largest fraction first rounds up.
    above = ((ratio.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return above + amax * 0.0


def quantise(x_RC: Tensor, granularity: Granularity, dtype: torch.dtype) -> Quantised:
    """Cast with scales from the matrix itself (current scaling).

    If there are several scales, they are computed and used while a chunk of the matrix is in the cache: this is 20%
    faster for rows than `amaxes` and then `cast`, and 10% faster for tiles.
    """
    if granularity == "tensor" or not x_RC.shape[0]:
        return cast(x_RC, granularity, dtype, scales_for(amaxes(x_RC, granularity), dtype))
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    height, width = _group_shape(granularity, x_RC.shape[1])
    scales = x_RC.new_empty(math.ceil(x_RC.shape[0] / height), math.ceil(x_RC.shape[1] / width), dtype=torch.float32)
    _quantise(x_RC, granularity, values_RC, scales)
    return Quantised(values_RC, scales, granularity)


def cast(x_RC: Tensor, granularity: Granularity, dtype: torch.dtype, scales: Tensor) -> Quantised:
    """Cast with given scales; elements too large for them saturate.

    Scales must be nan for parts of the matrix that are not finite. Scales from its own amaxes are; add amax x 0 to
    other ones.
    """
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    _cast(x_RC, scales, granularity, values_RC)
    return Quantised(values_RC, scales, granularity)


def cast_groups(x_RC: Tensor, ranges: Ranges, dtype: torch.dtype, scales_g: Tensor) -> Tensor:
    """The values of a matrix whose rows have one scale for each group, [R, C]; `ranges` are the groups."""
    values_RC = torch.empty(x_RC.shape, dtype=dtype, device=x_RC.device)
    for group, rows in ranges:
        _cast(x_RC[rows], scales_g[group], "tensor", values_RC[rows])
    return values_RC


def transposed(matrix: Quantised) -> Quantised:
    """The transpose, with contiguous rows; only for granularities whose scales serve both directions."""
    assert matrix.granularity in ("tensor", "block"), f"a scale a {matrix.granularity} is for one direction"
    bytes_CR = matrix.values.view(torch.uint8).t().contiguous()
    return Quantised(bytes_CR.view(matrix.values.dtype), matrix.scales.t(), matrix.granularity)


def spread(x_RC: Tensor, scales: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """A matrix and its scales in shapes that can be multiplied; views if the matrix consists of whole tiles or
    blocks."""
    if granularity in ("tensor", "row"):
        return x_RC, scales
    num_rows, num_columns = x_RC.shape
    if granularity == "tile" and num_columns % TILE == 0 and x_RC.is_contiguous():
        return x_RC.view(num_rows, num_columns // TILE, TILE), scales[:, :, None]
    if num_columns % TILE == num_rows % TILE == 0 and granularity == "block" and x_RC.is_contiguous():
        return x_RC.view(num_rows // TILE, TILE, num_columns // TILE, TILE), scales[:, None, :, None]
    return x_RC, expanded(scales, granularity, x_RC.shape)


def expanded(scales: Tensor, granularity: Granularity, shape: torch.Size) -> Tensor:
    """Scales in a shape that multiplies a matrix of `shape`."""
    if granularity in ("tensor", "row"):
        return scales
    num_rows, num_columns = shape
    r, c = scales.shape
    height = TILE if granularity == "block" else 1
    return scales[:, None, :, None].expand(r, height, c, TILE).reshape(r * height, c * TILE)[:num_rows, :num_columns]


def _amaxes_of_chunk(x_RC: Tensor, granularity: Granularity) -> Tensor:
    num_rows, num_columns = x_RC.shape
    if granularity == "row":
        return x_RC.abs().amax(1, keepdim=True)
    height = TILE if granularity == "block" else 1
    missing = (0, -num_columns % TILE, 0, -num_rows % height)
    padded = functional.pad(x_RC, missing) if any(missing) else x_RC
    return padded.abs().view(-1, height, padded.shape[1] // TILE, TILE).amax((1, 3))


def _group_shape(granularity: Granularity, num_columns: int) -> tuple[int, int]:
    """The numbers of rows and columns that share a scale."""
    return TILE if granularity == "block" else 1, num_columns if granularity == "row" else TILE


def _no_scales(x_RC: Tensor, granularity: Granularity) -> Tensor:
    width = 1 if granularity == "row" else math.ceil(x_RC.shape[1] / TILE)
    return torch.zeros(0, width, device=x_RC.device)


def _store(values: Tensor, x_RC: Tensor, scales: Tensor, granularity: Granularity) -> None:
    # The cast saturates on some devices, and gives nan or infinity on others.
    largest = LARGEST[values.dtype]
    x, spread_scales = spread(x_RC, scales, granularity)
    values.copy_((x * spread_scales.reciprocal()).clamp_(-largest, largest).view(values.shape))


def _rows_of(scales: Tensor, granularity: Granularity, rows: slice) -> Tensor:
    if granularity == "tensor":
        return scales
    height = TILE if granularity == "block" else 1
    return scales[rows.start // height : math.ceil(rows.stop / height)]


def _chunks(x_RC: Tensor) -> Iterator[slice]:
    """The rows of each chunk, in whole blocks. On a CPU a chunk stays in the cache."""
    num_rows, num_columns = x_RC.shape
    elements = _CPU_CHUNK_ELEMENTS if x_RC.device.type == "cpu" else _CHUNK_ELEMENTS
    step = max(TILE, elements // max(1, num_columns) // TILE * TILE)
    for first in range(0, num_rows, max(1, step)):
        yield slice(first, min(first + step, num_rows))


def _quantise_in_turn(x_RC: Tensor, granularity: Granularity, values_RC: Tensor, scales: Tensor) -> None:
    for rows in _chunks(x_RC):
        chunk, chunk_scales = x_RC[rows].float(), _rows_of(scales, granularity, rows)
        chunk_scales.copy_(scales_for(_amaxes_of_chunk(chunk, granularity), values_RC.dtype))
        _store(values_RC[rows], chunk, chunk_scales, granularity)


def _quantise_at_once(x_RC: Tensor, granularity: Granularity, values_RC: Tensor, scales: Tensor) -> None:
    x = x_RC.float()
    own_scales = scales_for(_amaxes_of_chunk(x, granularity), values_RC.dtype)
    scales.copy_(own_scales)
    _store(values_RC, x, own_scales, granularity)


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
