"""Several charts with one scale side by side, of settings that are to be compared."""

from dataclasses import dataclass

from shardwright.report.svg import LINE_COLOURS, Box, Line, LineChart, document, legend, text

_WIDTH, _LEFT, _ACROSS, _CHART, _PITCH, _TOP = 1120.0, 40.0, 4, (224.0, 170.0), (270.0, 240.0), 104.0


@dataclass(frozen=True)
class Panel:
    """A title and named curves of points (x, y)."""

    title: str
    curves: list[tuple[str, list[tuple[float, float]]]]


def balance_picture(title: str, note: str, panels: list[Panel], most: float, dashed: str) -> str:
    """The SVG document: a dotted line at `most` in each chart, curves named `dashed` broken, and what colours mean."""
    names = list(dict.fromkeys(name for panel in panels for name, _ in panel.curves))
    kept = [name for name in names if name != dashed]
    names = kept + [dashed] * (dashed in names)
    colours = {dashed: LINE_COLOURS[1]} | dict(zip(kept, LINE_COLOURS[:1] + LINE_COLOURS[2:], strict=False))
    highest = max(y for panel in panels for _, points in panel.curves for _, y in points)
    parts = [text(20, 30, title, "name", 15), text(20, 49, note, size=12)]
    wide, high = _CHART
    for number in range(len(panels) + 1):
        box = Box(_LEFT + number % _ACROSS * _PITCH[0], _TOP + number // _ACROSS * _PITCH[1], wide, high)
        if number < len(panels):
            panel = panels[number]
            lines = [Line(name, points, colours[name], name == dashed) for name, points in panel.curves]
            parts += LineChart(panel.title, box, lines, highest, most).drawn()
        else:
            parts.append(text(box.left, box.top - 10, "balanced by", "name", 12))
            for row, name in enumerate(names):
                parts += legend(box.left, box.top + 12 + 22 * row, [Line(name, (), colours[name], name == dashed)])
    rows = -(-(len(panels) + 1) // _ACROSS)
    return document(title, _WIDTH, _TOP + rows * _PITCH[1] - 20, parts)
