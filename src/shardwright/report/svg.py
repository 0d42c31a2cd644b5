"""Parts that SVG pictures of runs share: the frame, colours that are legible in light and dark mode, text, charts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.report.axis_ticks import nice_step

LINE_COLOURS = ("#3b82f6", "#e5484d", "#0f9d8a", "#f59f00", "#8b5cf6", "#d6409f", "#65a30d", "#0891b2")

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.ground { fill: #ffffff; stroke: #e3e6eb } .name { fill: #1c2230; font-weight: 600 } .quiet { fill: #667085 }
.grid { stroke: #e6e9ee } .mark { stroke: #98a2b3 } .frame { fill: none; stroke: #cbd2dc }
@media (prefers-color-scheme: dark) {
.ground { fill: #161a21; stroke: #2a303b } .name { fill: #e7eaf0 } .quiet { fill: #97a1b2 }
.grid { stroke: #252b35 } .mark { stroke: #667085 } .frame { stroke: #3d4656 }
}"""

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


def document(label: str, width: float, height: float, parts: Sequence[str], style: str = "") -> str:
    """An SVG document. `style` is CSS in addition to the CSS of all documents."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(label)}">',
            f"<title>{escape(label)}</title><style>{_STYLE}{style}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "quiet", size: float = 11.0, anchor: str = "start") -> str:
    """One line of text with its baseline at y."""
    aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{px(x)}" y="{px(y)}" font-size="{size:g}"{aligned}>{escape(words)}</text>'


def px(value: float) -> str:
    """Pixels as text with one decimal, which is enough for a picture."""
    return f"{round(value, 1):.10g}"


def line_chart(
    title: str,
    box: Box,
    lines: Sequence[Line],
    most: float,
    mark: float | None = None,
    form: Callable[[float], str] = "{:g}".format,
    ticks: Mapping[float, str] | None = None,
) -> list[str]:
    """Lines in a box, y from 0 to at least `most`, with a title above, x below and a dashed line at `mark`.

    `ticks` are labels by x, in place of round numbers.
    """
    xs = [x for line in lines for x, _ in line.points]
    first_x, last_x = min(xs), max(xs)
    highest = max(most, *(y for line in lines for _, y in line.points))
    step = nice_step(highest / 4)
    num_steps = math.ceil(highest / step - _ABOVE)
    top = num_steps * step

    def across(x: float) -> float:
        return box.left + (x - first_x) / ((last_x - first_x) or 1.0) * box.width

    def down(y: float) -> float:
        return box.bottom - y / top * box.height

    parts = [text(box.left, box.top - 10, title, "name", 12)]
    for n in range(num_steps + 1):
        y = down(n * step)
        parts.append(f'<line class="grid" x1="{px(box.left)}" x2="{px(box.right)}" y1="{px(y)}" y2="{px(y)}"/>')
        parts.append(text(box.left - 6, y + 4, form(n * step), anchor="end"))
    if ticks is None:
        parts += x_axis(box, first_x, last_x)
    else:
        parts += [text(across(x), box.bottom + 15, words, anchor="middle") for x, words in ticks.items()]
    if mark is not None:
        y = down(mark)
        parts.append(
            f'<line class="mark" stroke-dasharray="2 3" x1="{px(box.left)}" x2="{px(box.right)}" '
            f'y1="{px(y)}" y2="{px(y)}"/>'
        )
    for line in lines:
        points = " ".join(f"{px(across(x))},{px(down(y))}" for x, y in line.points)
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(
            f'<polyline fill="none" stroke="{line.colour}" stroke-width="1.6"{dashes} points="{points}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    return parts


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
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(
            f'<line stroke="{line.colour}" stroke-width="2.5"{dashes} x1="{px(x)}" x2="{px(x + 20)}" '
            f'y1="{px(y - 4)}" y2="{px(y - 4)}"/>'
        )
        parts.append(text(x + 26, y, line.name))
        x += 26 + 6.2 * len(line.name) + 18
    return parts
