"""Fp8, once more and independently: every number from its bits, and rounding by looking for the nearest."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.precision import float8_linear
from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_linear import Float8Linear, ReduceMax, on_one_rank, step_amaxes

Numbers = NDArray[np.float64]
Codes = NDArray[np.uint8]

# Bits of exponent and fraction, bias, largest number (Micikevicius et al. 2022, table 1).
FORMATS = {torch.float8_e4m3fn: (4, 3, 7, 448.0), torch.float8_e5m2: (5, 2, 15, 57344.0)}


def positive_numbers(dtype: torch.dtype) -> Numbers:
    """Every number from 0 to the largest, in the order of their codes."""
    _, fraction_bits, bias, largest = FORMATS[dtype]
    numbers = []
    for code in range(128):
        exponent, fraction = code >> fraction_bits, code & ((1 << fraction_bits) - 1)
        share = fraction / (1 << fraction_bits)
        numbers.append((1 + share) * 2.0 ** (exponent - bias) if exponent else share * 2.0 ** (1 - bias))
    return np.array([number for number in numbers if number <= largest])


def rounded_codes(x: Numbers, dtype: torch.dtype) -> Codes:
    """The code of the nearest number, of two equally near the even code; beyond the largest, the largest."""
    table = positive_numbers(dtype)
    size = np.minimum(np.abs(x), table[-1])
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - size, size - table[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def scale_for(amax: float, dtype: torch.dtype) -> float:
    """The smallest power of two such that the largest number times it is at least amax."""
    largest, scale = FORMATS[dtype][3], 1.0
    while largest * scale < max(amax, 2.0**-100):
        scale *= 2.0
    while largest * scale / 2.0 >= max(amax, 2.0**-100):
        scale /= 2.0
    return scale


def scales_by_element(x: Numbers, granularity: Granularity, dtype: torch.dtype) -> Numbers:
    """The scale of each element, by loops over what shares one."""
    num_rows, num_columns = x.shape
    high, wide = {
        "tensor": (num_rows, num_columns),
        "row": (1, num_columns),
        "tile": (1, 128),
        "block": (128, 128),
    }[granularity]
    scales = np.empty_like(x)
    for row in range(0, num_rows, high):
        for column in range(0, num_columns, wide):
            part = np.s_[row : row + high, column : column + wide]
            scales[part] = scale_for(float(np.abs(x[part]).max()), dtype)
    return scales


def rounding_bound(x: Numbers, scales: Numbers, dtype: torch.dtype) -> Numbers:
    """By how much a number can be wrong after the cast: half a last place, or half the smallest number."""
    _, fraction_bits, bias, _ = FORMATS[dtype]
    return np.maximum(np.abs(x) * 2.0 ** -(fraction_bits + 1), scales * 2.0 ** -(bias + fraction_bits))


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul_(3).exp2_()


def codes(matrix: Quantised) -> Codes:
    """The bytes of a matrix, on the CPU."""
    return matrix.values.view(torch.uint8).cpu().numpy()


def end_step(states: Sequence[Float8Linear], reduce_max: ReduceMax = on_one_rank) -> None:
    """The end of a step for layers that nobody else looks after."""
    amaxes = step_amaxes(states, reduce_max, torch.device("cpu"))
    float8_linear.end_step(states, () if amaxes is None else amaxes.tolist())
