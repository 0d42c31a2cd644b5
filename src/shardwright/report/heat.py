"""Multiples of a mean as colours: blue is less, orange is more, and values near the mean have the
colour of the background."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from shardwright.report.svg import Box, px, text

# Bounds between levels, as multiples of the mean.
BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)
_LIGHT = ("#1d4ed8", "#5b8def", "#a3c0f7", "#d6e3fb", "#f2f4f7", "#fce3c0", "#f9b35c", "#e8760c", "#9a3412")
_DARK = ("#60a5fa", "#3b74d0", "#2c5190", "#243a5e", "#232932", "#5a3d1c", "#995a12", "#e0831a", "#ffc27a")

STYLE = "".join(f"\n.h{n} {{ fill: {colour} }}" for n, colour in enumerate(_LIGHT)) + (
    "\n@media (prefers-color-scheme: dark) {"
    + "".join(f"\n.h{n} {{ fill: {colour} }}" for n, colour in enumerate(_DARK))
    + "\n}"
)


def level(multiple: float) -> int:
    """The number of the colour of a multiple."""
    return bisect_right(BOUNDS, multiple)


def heat_map(rows: Sequence[Sequence[float]], box: Box, kind: str) -> list[str]:
    """SVG elements of a map of [rows][columns] multiples; nan leaves a cell out. Equal neighbours become one rectangle.

    `kind` is the name of this map in the source of the picture.
    """
    high, wide = box.height / len(rows), box.width / len(rows[0])
    parts = [f'<g class="{kind}" shape-rendering="crispEdges">']
    for number, row in enumerate(rows):
        start = 0
        levels = [None if math.isnan(multiple) else level(multiple) for multiple in row]
        for end in range(1, len(levels) + 1):
            if end < len(levels) and levels[end] == levels[start]:
                continue
            if levels[start] is not None:
                parts.append(
                    f'<rect class="h{levels[start]}" x="{px(box.left + start * wide)}" '
                    f'y="{px(box.top + number * high)}" width="{px((end - start) * wide)}" height="{px(high)}"/>'
                )
            start = end
    frame = f'x="{px(box.left)}" y="{px(box.top)}" width="{px(box.width)}" height="{px(box.height)}"'
    return [*parts, f'<rect class="frame" {frame}/>', "</g>"]


def heat_legend(legend_left: float, y: float, label: str) -> list[str]:
    """SVG elements of the colours with their bounds, and a label."""
    wide = 34.0
    parts = []
    for number in range(len(BOUNDS) + 1):
        x = legend_left + number * wide
        parts.append(f'<rect class="h{number}" x="{px(x)}" y="{px(y - 10)}" width="{px(wide)}" height="11"/>')
    for number, bound in enumerate(BOUNDS):
        parts.append(text(legend_left + (number + 1) * wide, y + 13, f"{bound:.3g}", size=10, anchor="middle"))
    return [*parts, text(legend_left + (len(BOUNDS) + 1) * wide + 10, y, label)]
