"""The pen of all SVG pictures: frame, colours that are legible in light and dark mode, text, line charts, heat maps.

Heat maps show multiples of a mean: blue is less, orange is more, and values near the mean have the colour of the
background.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.config.text_columns import num_columns

LINE_COLOURS = ("#3b82f6", "#e5484d", "#0f9d8a", "#f59f00", "#8b5cf6", "#d6409f", "#65a30d", "#0891b2")

FONT = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
"""
STYLE = (
    FONT
    + """\
.ground { fill: #ffffff; stroke: #e3e6eb } .name { fill: #1c2230; font-weight: 600 } .quiet { fill: #667085 }
.grid { stroke: #e6e9ee } .mark { stroke: #98a2b3 } .frame { fill: none; stroke: #cbd2dc }
@media (prefers-color-scheme: dark) {
.ground { fill: #161a21; stroke: #2a303b } .name { fill: #e7eaf0 } .quiet { fill: #97a1b2 }
.grid { stroke: #252b35 } .mark { stroke: #667085 } .frame { stroke: #3d4656 }
}"""
)

_ABOVE = 0.02  # a line may exceed the top of the axis by this share of a tick


@dataclass(frozen=True)
class Box:
    """A rectangle to draw in, in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height


@dataclass(frozen=True)
class Line:
    """Points (x, y) from left to right, and a name, which is shown if the user points at the line."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False

    @property
    def dashes(self) -> str:
        """The attribute of a dashed line; empty for others."""
        return ' stroke-dasharray="5 4"' if self.is_dashed else ""


def document(
    label: str, width: float, height: float, parts: Sequence[str], style: str = STYLE, definitions: str = ""
) -> str:
    """An SVG document with its CSS, and definitions that its parts refer to."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(label)}">',
            f"<title>{escape(label)}</title><style>{style}</style>{definitions}",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "quiet", size: float = 11.0, anchor: str = "start") -> str:
    """One line of text with its baseline at y."""
    aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{px(x)}" y="{px(y)}" font-size="{size:g}"{aligned}>{escape(words)}</text>'


def px(value: float, decimals: int = 1) -> str:
    """Pixels as text with few decimals, which are enough for a picture."""
    return f"{round(value, decimals):.10g}"


def horizontal_line(kind: str, box: Box, y: float, dashes: str = "") -> str:
    """A line across a box at height y."""
    return f'<line class="{kind}"{dashes} x1="{px(box.left)}" x2="{px(box.right)}" y1="{px(y)}" y2="{px(y)}"/>'


@dataclass(frozen=True)
class LineChart:
    """Lines in a box, y from `least` to at least `most`, with a title above, x below and a dashed line at `mark`.

    `form` writes a value of y. `ticks` are labels by x, in place of round numbers.
    """

    title: str
    box: Box
    lines: Sequence[Line]
    most: float
    mark: float | None = None
    form: Callable[[float], str] = "{:g}".format
    ticks: Mapping[float, str] | None = None
    least: float = 0.0

    def drawn(self) -> list[str]:
        """The SVG elements."""
        box, highest = self.box, max(self.most, *(y for line in self.lines for _, y in line.points))
        step = nice_step((highest - self.least) / 4)
        lowest = math.floor(self.least / step + _ABOVE)
        heights = [n * step for n in range(lowest, math.ceil(highest / step - _ABOVE) + 1)]

        def down(y: float) -> float:
            return box.bottom - (y - heights[0]) / (heights[-1] - heights[0]) * box.height

        parts = [text(box.left, box.top - 10, self.title, "name", 12)]
        for y in heights:
            parts.append(horizontal_line("grid", box, down(y)))
            parts.append(text(box.left - 6, down(y) + 4, self.form(y), anchor="end"))
        parts += self._x_labels()
        if self.mark is not None:
            parts.append(horizontal_line("mark", box, down(self.mark), ' stroke-dasharray="2 3"'))
        for line in self.lines:
            points = " ".join(f"{px(self._across(x))},{px(down(y))}" for x, y in line.points)
            parts.append(
                f'<polyline fill="none" stroke="{line.colour}" stroke-width="1.6"{line.dashes} points="{points}">'
                f"<title>{escape(line.name)}</title></polyline>"
            )
        return parts

    def _ends(self) -> tuple[float, float]:
        xs = [x for line in self.lines for x, _ in line.points]
        return min(xs), max(xs)

    def _across(self, x: float) -> float:
        first_x, last_x = self._ends()
        return self.box.left + (x - first_x) / ((last_x - first_x) or 1.0) * self.box.width

    def _x_labels(self) -> list[str]:
        if self.ticks is None:
            return x_axis(self.box, *self._ends())
        y = self.box.bottom + 15
        return [text(self._across(x), y, words, anchor="middle") for x, words in self.ticks.items()]


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, ...) that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def x_axis(box: Box, first_x: float, last_x: float) -> list[str]:
    """Labels below a box: the round numbers from `first_x` to `last_x`."""
    step = max(1.0, nice_step((last_x - first_x) / max(2.0, box.width / 90) or 1.0))
    parts = []
    for n in range(math.ceil(first_x / step), math.floor(last_x / step) + 1):
        x = box.left + (n * step - first_x) / ((last_x - first_x) or 1.0) * box.width
        parts.append(text(x, box.bottom + 15, f"{n * step:g}", anchor="middle"))
    return parts


def legend(left_edge: float, y: float, lines: Sequence[Line]) -> list[str]:
    """Names of lines, side by side."""
    x, parts = left_edge, list[str]()
    for line in lines:
        parts.append(
            f'<line stroke="{line.colour}" stroke-width="2.5"{line.dashes} x1="{px(x)}" x2="{px(x + 20)}" '
            f'y1="{px(y - 4)}" y2="{px(y - 4)}"/>'
        )
        parts.append(text(x + 26, y, line.name))
        x += 26 + 6.2 * num_columns(line.name) + 18
    return parts


# Bounds between the colours of a heat map, as multiples of the mean.
BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)
_LIGHT = ("#1d4ed8", "#5b8def", "#a3c0f7", "#d6e3fb", "#f2f4f7", "#fce3c0", "#f9b35c", "#e8760c", "#9a3412")
_DARK = ("#60a5fa", "#3b74d0", "#2c5190", "#243a5e", "#232932", "#5a3d1c", "#995a12", "#e0831a", "#ffc27a")

HEAT_STYLE = "".join(f"\n.h{n} {{ fill: {colour} }}" for n, colour in enumerate(_LIGHT)) + (
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
