"""Curves in one SVG picture, legible in light and dark: x in powers of ten, y linear."""

import math
from dataclasses import dataclass
from html import escape

from shardwright.report.svg import nice_step

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 460, 56, 180, 24, 48
_COLOURS = (
    "#6b7280", "#3b82f6", "#8b5cf6", "#0f9d8a", "#f59f00", "#e5484d", "#d6409f", "#65a30d", "#0891b2", "#a16207",
)  # fmt: skip
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 12px }
.ground { fill: #ffffff; stroke: #e3e6eb } .quiet { fill: #667085 } .grid { stroke: #eceef2 }
@media (prefers-color-scheme: dark) {
.ground { fill: #161a21; stroke: #2a303b } .quiet { fill: #97a1b2 } .grid { stroke: #20262f }
}"""


@dataclass(frozen=True)
class Curve:
    """Points (x > 0, y) from left to right. Without a number of its own a curve has the colour of its place."""

    name: str
    points: list[tuple[float, float]]
    colour: int | None = None
    is_dashed: bool = False


def curves_picture(title: str, x_name: str, y_name: str, curves: list[Curve]) -> str:
    """The SVG document. Names stand at the ends of their curves, where they are moved up if need be."""
    xs = [math.log10(x) for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)

    def across(log_x: float) -> float:
        return _LEFT + (log_x - x_low) / ((x_high - x_low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_low) / ((y_high - y_low) or 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="8"/>',
    ]
    for x_value in _ticks(x_low, x_high):
        x = across(math.log10(x_value))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{x_value:g}</text>')
    step = nice_step((y_high - y_low) / 8 or 1.0)
    for n in range(math.ceil(y_low / step), math.floor(y_high / step) + 1):
        y = down(n * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{n * step:g}</text>')
    ends = [(across(math.log10(curve.points[-1][0])), down(curve.points[-1][1])) for curve in curves]
    for number, (curve, (x, _), y) in enumerate(zip(curves, ends, _apart(ends), strict=True)):
        colour = _COLOURS[(number if curve.colour is None else curve.colour) % len(_COLOURS)]
        line = " ".join(f"{across(math.log10(x)):.1f},{down(y):.1f}" for x, y in curve.points)
        dashes = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dashes} points="{line}"/>')
        parts.append(f'<text fill="{colour}" x="{x + 6:.1f}" y="{y + 4:.1f}">{escape(curve.name)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="quiet" x="{middle:g}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text class="quiet" x="12" y="16">{escape(y_name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _ticks(log_low: float, log_high: float) -> list[float]:
    """Powers of ten between these; where there are few, also twice and five times as much."""
    steps = (1, 2, 5) if log_high - log_low < 2 else (1,)
    values = [s * 10.0**power for power in range(math.floor(log_low), math.ceil(log_high) + 1) for s in steps]
    return [value for value in values if log_low <= math.log10(value) <= log_high]


def _apart(ends: list[tuple[float, float]], wide: float = 40.0, high: float = 14.0) -> list[float]:
    """Heights of names at these points, moved up where two would lie on each other."""
    placed: dict[int, tuple[float, float]] = {}
    for i in sorted(range(len(ends)), key=lambda i: -ends[i][1]):
        x, y = ends[i]
        near = sorted((other for across, other in placed.values() if abs(across - x) < wide), reverse=True)
        for other in near:
            if abs(other - y) < high:
                y = other - high
        placed[i] = (x, y)
    return [placed[i][1] for i in range(len(ends))]
