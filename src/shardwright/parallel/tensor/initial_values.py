"""Initial weights: a function of (seed, name, row, column) only, computed by the rank that holds them.

A rank that holds a part of a tensor computes that part and nothing else, so every plan starts from the same model, bit
for bit. An element's column is its index along the last dim of the full tensor, its row the index of that vector; a
tensor of one dim is one row.

Two keys of 32 bits are hashed from (seed, name) and the row, and 32 random bits from these keys and the column. The
inverse of the normal distribution function, approximated by short straight lines, turns these bits into a standard
normal number: a table look-up, one product and one sum. Every operation is on integers, or rounds to the nearest as
IEEE 754 defines. So the bits do not depend on vector instructions, number of threads or device, as a logarithm would.
Box-Muller in float64 needs one, and takes some ten times as long.

Shape suffixes: R rows, C columns.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwright.config.adapter import AdapterSpec
from shardwright.parallel.tensor.counter_rng import random_words
from shardwright.parallel.tensor.parameter import name_parameters, placed_parameters
from shardwright.precision.nf4 import quantise
from shardwright.sharding.parameter_shard import ParameterShard

# Writes initial values of a box to a flat tensor of any number type, from a given element on, in row-major order.
Initial = Callable[[ParameterShard, int, Tensor], None]

# Elements of a block, with three buffers of 4 bytes each: 384 KiB for each thread of a CPU, which stay in its cache, or
# 48 MiB on CUDA.
_BLOCKS = {"cpu": 1 << 15, "cuda": 1 << 22}
_ELEMENTS_IN_NF4 = 1 << 22  # elements that are drawn, or read, before they become NF4
_ROWS_AT_A_TIME = 1 << 10  # rows whose keys are hashed together, if a block has fewer rows

# There is one line of the distribution for each value of the exponent and of so many leading bits of the fraction.
_BITS = 8
_LINES = 32 << _BITS
_FOR_NEGATIVE = 1 << (31 - (23 - _BITS))  # the sign bit of a float32 after its last bits are shifted away


def seeded(seed: int) -> Initial:
    """Initial weights that are a function of a seed."""
    return partial(write_initial, seed)


def materialise(module: nn.Module, seed: int, device: torch.device, adapter: AdapterSpec | None = None) -> None:
    """Give every parameter its name, memory of its own and its initial values. With an `adapter` all others are
    frozen."""
    name_parameters(module, device, torch.float32, adapter)
    for parameter in placed_parameters(module).values():
        if parameter.place.nf4_row is None:
            parameter.data = initial_box(parameter.place, seed, device)
        else:
            parameter.data = torch.empty(parameter.shape, dtype=torch.int32, device=device)
            in_nf4(seeded(seed))(parameter.place, 0, parameter.data.view(-1))


def in_nf4(initial: Initial) -> Initial:
    """Initial values of boxes in NF4: their elements are counted in words. Rows of which a rank holds a part are drawn
    whole if their scales are quantised together."""

    def write(place: ParameterShard, start: int, out: Tensor) -> None:
        row = place.nf4_row
        assert row is not None
        if row.is_double:
            place = replace(place, box=(*place.box[:-1], (0, row.full)))
        width, num_words, stop = place.shape[-1], row.num_words, start + out.numel()
        rows_at_once = max(1, _ELEMENTS_IN_NF4 // width)
        for first in range(start // num_words, -(-stop // num_words), rows_at_once):
            end = min(first + rows_at_once, -(-stop // num_words))
            values_RC = torch.empty(end - first, width, device=out.device)
            initial(place, first * width, values_RC.view(-1))
            low, high = max(start, first * num_words), min(stop, end * num_words)
            words = quantise(values_RC, row).view(-1)[low - first * num_words : high - first * num_words]
            out[low - start : high - start].copy_(words)

    return write


def initial_box(place: ParameterShard, seed: int, device: torch.device) -> Tensor:
    """The initial values of a box, float32."""
    values = torch.empty(place.shape, device=device)
    write_initial(seed, place, 0, values.view(-1))
    return values


def write_initial(seed: int, place: ParameterShard, start: int, out: Tensor) -> None:
    """Write the initial values of elements start, start + 1, ... of a box to all elements of a flat tensor.

    Working memory is that of one block, whatever the size.
    """
    if place.init != "normal" or not out.numel():
        out.fill_(1.0 if place.init == "ones" else 0.0)
        return
    key = int.from_bytes(hashlib.blake2b(f"{seed} {place.name}".encode(), digest_size=8).digest(), "little")
    writer = _Writer(place, key, out)
    for part in _rectangles(start, start + out.numel(), place.shape[-1]):
        writer.write(part)


@dataclass(frozen=True)
class _Rectangle:
    """Columns [first, end) of the rows [first_row, end_row) of a box, to be written from index `position` of the output
    on."""

    first_row: int
    end_row: int
    first: int
    end: int
    position: int

    @property
    def num_elements(self) -> int:
        return (self.end_row - self.first_row) * (self.end - self.first)


def _rectangles(start: int, stop: int, width: int) -> Iterator[_Rectangle]:
    """Elements [start, stop) of rows of `width`, as rectangles: the end of a row, full rows, the beginning of a row."""
    position = start
    while position < stop:
        row, column = divmod(position, width)
        if column or stop - position < width:
            end = min(column + stop - position, width)
            part = _Rectangle(row, row + 1, column, end, position - start)
        else:
            part = _Rectangle(row, row + (stop - position) // width, 0, width, position - start)
        yield part
        position += part.num_elements


class _Writer:
    """Writes initial values of one parameter; it has the parameter's scaled lines and working memory."""

    def __init__(self, place: ParameterShard, key: int, out: Tensor) -> None:
        self._place, self._key, self._out = place, key, out
        self._heights, self._slopes = _scaled_lines(place.std, out.device)
        # On a CPU an operator divides its elements among threads, so that each thread gets a block.
        threads = torch.get_num_threads() if out.device.type == "cpu" else 1
        self._block = min(_BLOCKS[out.device.type] * threads, out.numel())
        self._buffers = tuple(torch.empty(self._block, dtype=torch.int32, device=out.device) for _ in range(3))

    def write(self, part: _Rectangle) -> None:
        """Write a rectangle, block by block."""
        for first in range(part.first, part.end, self._block):
            end = min(first + self._block, part.end)
            columns_C = torch.arange(end - first, dtype=torch.int32, device=self._out.device)
            columns_C = (columns_C + (first + self._place.box[-1][0])) * _signed(0x9E3779B9)  # a Weyl sequence
            self._write_columns(part, first, columns_C)

    def _write_columns(self, part: _Rectangle, first: int, columns_C: Tensor) -> None:
        num_columns, width = len(columns_C), part.end - part.first
        rows_in_block = self._block // num_columns
        rows_with_keys = rows_in_block * max(1, _ROWS_AT_A_TIME // rows_in_block)
        out_RC = self._out[part.position :][: part.num_elements].view(-1, width)[:, first - part.first :][
            :, :num_columns
        ]
        for first_row in range(part.first_row, part.end_row, rows_with_keys):
            end_row = min(first_row + rows_with_keys, part.end_row)
            numbers_R = _row_numbers(self._place, first_row, end_row, self._out.device)
            keys_R2 = random_words(numbers_R, 1, self._key).view(torch.int32)
            target_RC = out_RC[first_row - part.first_row :]
            for i in range(0, end_row - first_row, rows_in_block):
                block_keys_R2 = keys_R2[i : i + rows_in_block]
                self._write_block(block_keys_R2, columns_C, target_RC[i : i + len(block_keys_R2)])

    def _write_block(self, keys_R2: Tensor, columns_C: Tensor, out_RC: Tensor) -> None:
        x, y, z = (buffer[: out_RC.numel()].view(out_RC.shape) for buffer in self._buffers)
        _hash(keys_R2, columns_C, x, y)
        # The first bits of the float32 nearest to the integer are the number of its line.
        u = y.view(torch.float32).copy_(x)
        torch.bitwise_right_shift(y, 23 - _BITS, out=x)
        lines = x.bitwise_and_(_FOR_NEGATIVE + _LINES - 1).view(-1)
        looked_up = z.view(torch.float32)
        # Height + slope x u: a product and a sum, each rounded.
        torch.index_select(self._slopes, 0, lines, out=looked_up.view(-1))
        u.mul_(looked_up)
        torch.index_select(self._heights, 0, lines, out=looked_up.view(-1))
        if out_RC.dtype == torch.float32:
            torch.add(looked_up, u, out=out_RC)
        else:
            out_RC.copy_(looked_up.add_(u))


def _row_numbers(place: ParameterShard, first: int, end: int, device: torch.device) -> Tensor:
    """The row numbers in the full tensor of rows [first, end) of a box, int64."""
    remaining_R = torch.arange(first, end, device=device)
    numbers_R, stride = torch.zeros_like(remaining_R), 1
    for (start, stop), size in reversed(list(zip(place.box[:-1], place.full_shape[:-1], strict=True))):
        numbers_R += (remaining_R % (stop - start) + start) * stride
        remaining_R //= stop - start
        stride *= size
    return numbers_R


def _hash(keys_R2: Tensor, columns_C: Tensor, x_RC: Tensor, y_RC: Tensor) -> None:
    """Fill x with 32 random bits for each row, given by its keys, and each column; y is overwritten.

    Multiplication carries bits up, xor with a shift carries them down. Factors and shifts are those of least bias that
    Wellons found for three rounds (2018, hash-prospector). The row's first key is the start of its counter. The second
    key is added after a round: without it, rows whose first keys are close would have the same numbers, shifted.
    """
    torch.add(keys_R2[:, :1], columns_C, out=x_RC)
    _carry_down(x_RC, 17, y_RC)
    x_RC.mul_(_signed(0xED5AD4BB)).add_(keys_R2[:, 1:])
    _carry_down(x_RC, 11, y_RC)
    x_RC.mul_(_signed(0xAC4C1B51))
    _carry_down(x_RC, 15, y_RC)
    x_RC.mul_(0x31848BAB)
    _carry_down(x_RC, 14, y_RC)


def _carry_down(x: Tensor, shift: int, y: Tensor) -> None:
    """Set x to x xor (x >> shift); y is overwritten."""
    # Shifts of signed integers copy the sign bit; the mask clears the copies, as in a shift of an unsigned number.
    torch.bitwise_right_shift(x, shift, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << (32 - shift)) - 1))


def _signed(number: int) -> int:
    """The 32-bit integer with the same bits: torch's integers are signed, and wrap around."""
    return number - (1 << 32) if number >> 31 else number


def _scaled_lines(std: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Heights and slopes of the lines of a normal distribution of standard deviation `std`, float32.

    The lines for negative integers begin at index _FOR_NEGATIVE; entries before it that belong to no line are not used.
    """
    heights, slopes = (torch.from_numpy(lines) * std for lines in _lines())
    tables = torch.empty(2, _FOR_NEGATIVE + _LINES)
    tables[0, :_LINES], tables[0, _FOR_NEGATIVE:] = heights, -heights
    tables[1, :_LINES], tables[1, _FOR_NEGATIVE:] = slopes, slopes
    table_heights, table_slopes = tables.to(device)
    return table_heights, table_slopes


@lru_cache(maxsize=1)
def _lines() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Heights and slopes of the lines that map an integer m, 1 to 2^31, to a standard normal number, float64.

    With probability m / 2^31 a normal number is further from 0: m near 0 gives the tails, 2^31 the middle. Lines meet
    at integers of which all but the first 9 bits are 0, so that they get shorter towards the tails, where the function
    is steeper. A line's number is the first bits of a float32, without the upper bits of the exponent, which differ
    only for m = 1. No line is further than 1e-6 from the function. m = 0 is on the line of 2, at 6.3.
    """
    heights, slopes = [0.0] * _LINES, [0.0] * _LINES
    inverse = NormalDist().inv_cdf
    low, at_low = 1.0, -inverse(2.0**-32)
    for exponent in range(31):
        for i in range(1 << _BITS):
            high = math.ldexp(1 + (i + 1) / (1 << _BITS), exponent)
            at_high = -inverse(high * 2.0**-32)
            line = ((127 + exponent) % 32 << _BITS) + i
            slopes[line] = (at_high - at_low) / (high - low)
            heights[line] = at_low - slopes[line] * low
            low, at_low = high, at_high
    return np.array(heights), np.array(slopes)
