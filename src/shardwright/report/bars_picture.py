"""Stacked bars: amounts by part, one bar a row, with a line where there is no more room."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.config.phrase import ENGLISH, in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.report import svg
from shardwright.report.svg import Box

_LEFT, _TOP, _BAR, _PITCH, _WIDTH, _RIGHT = 196.0, 70.0, 22.0, 34.0, 740.0, 96.0
_LABEL_CHAR = 7.4  # a column of a row's label
_LEGEND_STEP, _LEGEND_CHAR = 22.0, 7.0  # the square before a name, and a column of the name


@dataclass(frozen=True)
class StackedBars:
    """Bars of parts, from top to bottom: `rows` are (label, amount by part). `form` writes an amount. At `limit`, if it
    is not 0, is a dashed line with the text `limit_label`. Texts that are phrases are drawn in the asked language."""

    title: str
    rows: Sequence[tuple[str, Mapping[str, float]]]
    form: Callable[[float], str]
    limit: float = 0.0
    limit_label: str = ""

    def svg(self, language: str = ENGLISH) -> str:
        """The picture, with words of a language."""
        most = max(self.limit, *(sum(parts.values()) for _, parts in self.rows))
        scale = _WIDTH / most
        labels = [in_language(label, language) for label, _ in self.rows]
        left = max(_LEFT, 26 + _LABEL_CHAR * max(map(num_columns, labels)))
        names = list(dict.fromkeys(name for _, parts in self.rows for name, amount in parts.items() if amount))
        colours = dict(zip(names, svg.LINE_COLOURS * len(names), strict=False))
        bottom = _TOP + len(self.rows) * _PITCH
        title = in_language(self.title, language)
        drawn = [svg.text(16, 26, title, "name", 15)]
        for number, (label, (_, parts)) in enumerate(zip(labels, self.rows, strict=True)):
            drawn += self._bar(label, parts, Box(left, _TOP + number * _PITCH, _WIDTH, _BAR), scale, colours, language)
        if self.limit:
            x = svg.px(left + self.limit * scale)
            drawn.append(f'<line class="mark" stroke-dasharray="4 3" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{bottom}"/>')
            anchor = "end" if self.limit > most / 2 else "start"
            limit_label = in_language(self.limit_label, language)
            drawn.append(svg.text(left + self.limit * scale, _TOP - 14, limit_label, size=13, anchor=anchor))
        spoken_colours = {in_language(name, language): colours[name] for name in names}
        legend, legend_bottom = self._legend(spoken_colours, left, bottom + 16)
        return svg.document(title, left + _WIDTH + _RIGHT, legend_bottom + 20, [*drawn, *legend])

    def _bar(
        self,
        label: str,
        parts: Mapping[str, float],
        box: Box,
        scale: float,
        colours: Mapping[str, str],
        language: str,
    ) -> list[str]:
        x, middle = box.left, box.top + box.height / 2 + 4
        drawn = [svg.text(x - 10, middle, label, "name", 13, "end")]
        for name, amount in parts.items():
            if amount > 0:
                pointed_at = say("{name}: {amount}", name=name, amount=self.form(amount))
                place = f'x="{svg.px(x)}" y="{svg.px(box.top)}" width="{svg.px(amount * scale)}"'
                drawn.append(
                    f'<rect {place} height="{box.height:g}" '
                    f'fill="{colours[name]}" fill-opacity="0.85">'
                    f"<title>{escape(in_language(pointed_at, language))}</title></rect>"
                )
                x += amount * scale
        return [*drawn, svg.text(x + 8, middle, self.form(sum(parts.values())), "name", 13)]

    def _legend(self, colours: Mapping[str, str], left: float, y: float) -> tuple[list[str], float]:
        """Names beside their colours, in lines as wide as the picture, and the height at which the last one stands."""
        if len(colours) < 2:
            return [], y
        x, drawn = left, list[str]()
        for name, colour in colours.items():
            width = _LEGEND_STEP + _LEGEND_CHAR * num_columns(name)
            if x + width > left + _WIDTH + _RIGHT:
                x, y = left, y + 20
            place = f'x="{svg.px(x)}" y="{svg.px(y - 11)}" width="13" height="13"'
            drawn.append(f'<rect {place} fill="{colour}" fill-opacity="0.85"/>')
            drawn.append(svg.text(x + 19, y, name, size=13))
            x += width + 14
        return drawn, y
