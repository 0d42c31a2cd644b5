"""Formats of narrow numbers: bits a value with its part of a scale, the error of rounding to them, and the numbers
between which they round."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.api.loaded_job import load
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import in_language, say
from shardwright.config.units import bytes_text
from shardwright.learn.drawing import Drawing
from shardwright.report import svg

_SAMPLES = 64 * 128  # normal numbers, of which blocks are cut
_LEFT, _TOP, _PITCH, _BAR, _BIT, _WIDTH = 186.0, 74.0, 30.0, 18.0, 24.0, 960.0
_LINE_END = 6.0  # of the drawn lines of numbers


@dataclass(frozen=True)
class NarrowFormat:
    """Numbers with `exponent_bits` and `fraction_bits` beside the sign, up to `largest`. `block` values share a scale
    of `scale_bits`: a power of two, a number of e4m3, or float32 (OCP microscaling formats 1.0, section 5; NVIDIA
    Blackwell's NVFP4). 0 values share none."""

    name: str
    exponent_bits: int
    fraction_bits: int
    largest: float
    block: int = 0
    scale_bits: int = 0
    scale: "NarrowFormat | None" = None  # the numbers that scales are rounded to; without it they are powers of two

    @property
    def value_bits(self) -> int:
        """Bits of a value by itself."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bits(self) -> float:
        """Bits of a value with its part of the scale."""
        return self.value_bits + (self.scale_bits / self.block if self.block else 0.0)

    def rounded(self, value: float) -> float:
        """The nearest number of the format, or the largest."""
        if value == 0.0:
            return 0.0
        least = 2 - 2 ** (self.exponent_bits - 1)  # exponent of the smallest number with a leading one
        exponent = max(math.frexp(abs(value))[1] - 1, least)
        step = 2.0 ** (exponent - self.fraction_bits)
        return math.copysign(min(round(abs(value) / step) * step, self.largest), value)

    def magnitudes(self, end: float) -> list[float]:
        """All numbers from 0 to `end`."""
        step = 2.0 ** (2 - 2 ** (self.exponent_bits - 1) - self.fraction_bits)
        return sorted({self.rounded(count * step) for count in range(round(end / step) + 1)})

    def scaled_error(self, values: Sequence[float]) -> float:
        """The norm of the error of rounding, over the norm of the values. Each block is divided by its scale first."""
        size, whole = self.block or len(values), max(map(abs, values))
        squared = 0.0
        for start in range(0, len(values), size):
            block = values[start : start + size]
            scale = self._scale_of(max(map(abs, block)), whole) if self.block else 1.0
            squared += sum((value - scale * self.rounded(value / scale)) ** 2 for value in block)
        return math.sqrt(squared / sum(value * value for value in values))

    def _scale_of(self, largest: float, whole: float) -> float:
        """The scale of a block whose largest magnitude is `largest`, in a tensor with `whole`."""
        if self.scale is None:
            return 2.0 ** (math.floor(math.log2(largest)) - math.floor(math.log2(self.largest)))
        of_tensor = whole / self.largest / self.scale.largest  # keeps scales within their numbers
        return of_tensor * self.scale.rounded(largest / self.largest / of_tensor)


_FLOAT32 = NarrowFormat("float32", 8, 23, (2 - 2.0**-23) * 2.0**127)
_E4M3 = NarrowFormat("e4m3", 4, 3, 448.0)
_E2M1 = NarrowFormat("e2m1", 2, 1, 6.0)
FORMATS = (
    NarrowFormat("bf16", 8, 7, (2 - 2.0**-7) * 2.0**127),
    NarrowFormat("fp8 e4m3, 128", 4, 3, 448.0, 128, 32, _FLOAT32),
    NarrowFormat("MXFP8 e4m3, 32", 4, 3, 448.0, 32, 8),
    NarrowFormat("NVFP4 e2m1, 16", 2, 1, 6.0, 16, 8, _E4M3),
    NarrowFormat("MXFP4 e2m1, 32", 2, 1, 6.0, 32, 8),
)


def narrow_numbers_figure() -> Drawing:
    """A row for each format above the numbers of the narrowest two."""
    draw = random.Random(0)
    values = [draw.gauss(0.0, 1.0) for _ in range(_SAMPLES)]
    rows = [(one, one.scaled_error(values)) for one in FORMATS]
    model = load("llama3-8b", "plan.dp=1", devices=1, device="h100-sxm").spec.model
    return partial(_drawn, rows, shape_of(model).parameters)


def _drawn(rows: Sequence[tuple[NarrowFormat, float]], parameters: int, language: str) -> str:
    title = in_language(say("Bits a value, and what rounding of normal numbers costs"), language)
    parts = [svg.text(16, 26, title, "name", 15)]
    value, scale = svg.LINE_COLOURS[0], svg.LINE_COLOURS[3]
    legend = ((say("value"), value), (say("its part of the scale of a block"), scale))
    x = _LEFT
    for words, colour in legend:
        parts.append(f'<rect x="{svg.px(x)}" y="40" width="13" height="13" fill="{colour}" fill-opacity="0.85"/>')
        parts.append(svg.text(x + 19, 51, in_language(words, language), size=13))
        x += 90
    for number, (one, error) in enumerate(rows):
        y = _TOP + _PITCH * number
        parts.append(svg.text(_LEFT - 10, y + 14, one.name, "name", 13, "end"))
        for start, bits, colour in ((0.0, one.value_bits, value), (one.value_bits, one.bits - one.value_bits, scale)):
            parts.append(
                f'<rect x="{svg.px(_LEFT + start * _BIT)}" y="{svg.px(y)}" width="{svg.px(bits * _BIT)}" '
                f'height="{_BAR:g}" fill="{colour}" fill-opacity="0.85"/>'
            )
        told = say(
            "{bits:g} bits; weights of llama3-8b {size}; error {error:.2g} %",
            bits=one.bits,
            size=bytes_text(round(parameters * one.bits / 8)),
            error=100 * error,
        )
        parts.append(svg.text(_LEFT + one.bits * _BIT + 8, y + 14, in_language(told, language), size=13))
    top = _TOP + _PITCH * len(rows) + 34
    heading = in_language(say("All numbers from 0 to {end:g}", end=_LINE_END), language)
    parts.append(svg.text(16, top - 12, heading, "name", 15))
    for number, one in enumerate((_E4M3, _E2M1)):
        parts += _line(one, top + 24 + 34 * number)
    return svg.document(title, _WIDTH, top + 106, parts)


def _line(one: NarrowFormat, y: float) -> list[str]:
    """A tick at each number, and the numbers themselves where they are few."""
    scale, numbers = (_WIDTH - _LEFT - 30) / _LINE_END, one.magnitudes(_LINE_END)
    parts = [svg.text(_LEFT - 10, y + 4, one.name, "name", 13, "end")]
    parts.append(svg.horizontal_line("grid", svg.Box(_LEFT, 0, scale * _LINE_END, 0), y))
    path = "".join(f"M {svg.px(_LEFT + scale * number)} {svg.px(y - 6)} v 12 " for number in numbers)
    parts.append(f'<path d="{path.strip()}" stroke="{svg.LINE_COLOURS[0]}" stroke-width="1.2" fill="none"/>')
    if len(numbers) <= 16:
        named = ((_LEFT + scale * number, f"{number:g}") for number in numbers)
        parts += [svg.text(x, y + 24, name, size=12, anchor="middle") for x, name in named]
    return parts
