"""The use of experts in a run, as one picture drawn from the run's metrics.jsonl alone.

Each layer with experts has a band: the load of every expert over the steps, as a multiple of the mean, and the pairs of
experts that were chosen together, in the last step that counted them. Curves below show the busiest expert, the entropy
of the scores and the dropped choices. If nodes are known, bars show the bytes by kind of link.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwright.config.base import PlanError, error_text
from shardwright.config.phrase import ENGLISH, in_language, say
from shardwright.config.run_file_names import METRICS, PICTURE
from shardwright.config.units import MIB, bytes_text
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.report.output import replace_output, write_output
from shardwright.report.svg import (
    HEAT_STYLE,
    LINE_COLOURS,
    STYLE,
    Box,
    Line,
    LineChart,
    document,
    heat_legend,
    heat_map,
    legend,
    px,
    text,
    x_axis,
)
from shardwright.report.timeline.colours import rgb
from shardwright.train.run_files import name_faults

_MOST_BYTES = 256 * MIB  # a step of 60 layers with 256 experts writes some 100 kB
EVEN = 1.5  # a busiest expert up to this multiple of the mean counts as even
_WIDTH, _LEFT, _MAP, _SQUARE, _GAP = 1120.0, 120.0, 620.0, 104.0, 34.0
_MOST_COLUMNS, _MOST_ROWS = 155, 52  # of a heat map: a cell is at least 4 pixels wide and 2 high
_Translate = Callable[[str], str]  # the text of a phrase in the language of a picture
_LAST = 10  # steps whose mean is "at the end"
_PURPOSES = {
    "tokens to experts and back": say("tokens to experts and back"),
    "all else": say("all else"),
}  # of bytes, as the JSON has them
_FIGURES = ("largest_load", "dropped_share", "unserved_share", "entropy")  # of a layer and step, in metrics.jsonl


@dataclass(frozen=True)
class LayerUse:
    """A layer with experts over the steps of a run.

    `loads` is [steps][experts]; `figures` has values of each step, by name (`_FIGURES`); `together` is the last step
    that counted pairs, with the counts [experts][experts].
    """

    layer: int
    loads: list[list[int]]
    figures: dict[str, list[float]]
    together: tuple[int, list[list[int]]] | None

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return len(self.loads[0])


@dataclass(frozen=True)
class ExpertUse:
    """The use of experts in metrics.jsonl. `sent_bytes` has means of a step by purpose, each (inside nodes, between
    nodes); empty if nodes are unknown."""

    steps: list[int]
    layers: list[LayerUse]
    sent_bytes: dict[str, tuple[float, float]]


def read_use(folder: Path) -> ExpertUse:
    """Read a run's metrics. The run may still go on: an incomplete line is left out.

    Raises PlanError if there are no metrics, or none of experts.
    """
    path, fault = folder / METRICS, ""
    try:
        lines = read_text(path, _MOST_BYTES).splitlines()
        steps = [entry for entry in map(_entry, lines) if entry.get("experts")]
        if steps:
            numbers = [entry["step"] for entry in steps]
            layers = [_layer_use(steps, index) for index in range(len(steps[0]["experts"]))]
            return ExpertUse(numbers, layers, _sent(steps))
        way_out = say("train a model that has some, such as shardwright train quickstart-moe")
        fault = say("{path} has no step with experts; {way_out}", path=path, way_out=way_out)
    except FileNotFoundError:
        fault = say("there is no {path}; name the folder of a run, such as runs/quickstart-moe", path=path)
    except FileFault as error:
        fault = error_text(error)
    except OSError as error:
        fault = say("{path} can't be read: {reason}; name the folder of a run", path=path, reason=system_reason(error))
    except (KeyError, TypeError, IndexError) as error:
        fault = say(
            "{path} is not what this version writes of experts ({reason} in a step); train the run again",
            path=path,
            reason=repr(error),
        )
    raise PlanError(say("run {folder}", folder=str(folder)), [fault])


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _layer_use(steps: Sequence[dict[str, Any]], index: int) -> LayerUse:
    entries = [step["experts"][index] for step in steps]
    pair_counts = [
        (step["step"], entry["together"]) for step, entry in zip(steps, entries, strict=True) if entry.get("together")
    ]
    number, loads = entries[0]["layer"], [entry["load"] for entry in entries]
    figures = {name: [entry[name] for entry in entries] for name in _FIGURES}
    return LayerUse(number, loads, figures, together=pair_counts[-1] if pair_counts else None)


def _sent(steps: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    if any(entry.get("between_nodes_bytes") is None for entry in steps):
        return {}
    inside, between, experts_inside, experts_between = (
        fmean(entry[f"{prefix}{side}_nodes_bytes"] for entry in steps)
        for prefix in ("", "experts_")
        for side in ("inside", "between")
    )
    return {
        "tokens to experts and back": (experts_inside, experts_between),
        "all else": (inside - experts_inside, between - experts_between),
    }


def draw_use(folder: Path, svg: Path | None = None, language: str = ENGLISH) -> Path:
    """Draw a run's use of experts, with words of a language, into `svg`, or else into the run's folder. Returns the
    file; raises PlanError as `read_use` does."""
    picture = experts_picture(read_use(folder), folder.resolve().name, language)
    if svg is not None:
        write_output(svg, picture, "--svg")
        return svg
    if faults := name_faults(folder):
        raise PlanError(say("run {folder}", folder=str(folder)), faults)
    replace_output(folder / PICTURE, picture, "--svg")
    return folder / PICTURE


def use_text(use: ExpertUse, language: str = ENGLISH) -> str:
    """A line for each layer with its figures at the end of the run, and a line for each purpose of bytes."""
    heading = say(
        "steps {first} to {last}, means of the last {count}",
        first=use.steps[0],
        last=use.steps[-1],
        count=min(_LAST, len(use.steps)),
    )
    lines: list[str] = [heading]
    lines += [
        say("  layer {number}: {figures}", number=layer.layer, figures=tuple(_figures(layer))) for layer in use.layers
    ]
    for purpose, by_link in use.sent_bytes.items():
        inside, between = (bytes_text(round(num_bytes)) for num_bytes in by_link)
        lines.append(
            say(
                "  {purpose}: {inside} a step inside nodes, {between} between",
                purpose=_PURPOSES[purpose],
                inside=inside,
                between=between,
            )
        )
    return "\n".join(in_language(line, language) for line in lines)


def use_dict(use: ExpertUse) -> dict[str, Any]:
    """The use of experts for --json, shares as fractions."""
    return {
        "first_step": use.steps[0],
        "last_step": use.steps[-1],
        "layers": [{"layer": layer.layer, "experts": layer.num_experts} | _at_the_end(layer) for layer in use.layers],
        "sent_bytes": {
            purpose: {"inside_nodes": inside, "between_nodes": between}
            for purpose, (inside, between) in use.sent_bytes.items()
        },
    }


def _at_the_end(layer: LayerUse) -> dict[str, float]:
    """Means over the last steps."""
    return {name: fmean(of_steps[-_LAST:]) for name, of_steps in layer.figures.items()}


def _figures(layer: LayerUse) -> list[str]:
    end = _at_the_end(layer)
    most = math.log(layer.num_experts)
    return [
        say("busiest {load:.2f} x mean", load=end["largest_load"]),
        say("dropped {share:.1%}", share=end["dropped_share"]),
        say("unserved {share:.1%}", share=end["unserved_share"]),
        say("entropy {entropy:.2f} of {most:.2f}", entropy=end["entropy"], most=most),
    ]


def experts_picture(use: ExpertUse, name: str, language: str = ENGLISH) -> str:
    """The SVG document of a run of this name, with words of a language."""
    translate = partial(in_language, language=language)
    first_step, last_step = use.steps[0], use.steps[-1]
    title = say("{name}: how experts were used in steps {first} to {last}", name=name, first=first_step, last=last_step)
    label = translate(title)
    subtitle = say(
        "what gates asked for, before room in experts was looked at; figures are means of the last {count} steps",
        count=min(_LAST, len(use.steps)),
    )
    if any(layer.num_experts > _MOST_ROWS for layer in use.layers):
        subtitle = say("{subtitle}; where experts share a row, its busiest", subtitle=subtitle)
    multiples = say("load of an expert, or how often a pair was chosen, as a multiple of the mean")
    parts = [
        text(20, 30, label, "name", 15),
        text(20, 49, translate(subtitle), size=12),
        *heat_legend(_LEFT, 78, translate(multiples)),
    ]
    top = 130.0
    has_pairs = any(_pairs(layer) for layer in use.layers)
    parts.append(text(_LEFT, top - 10, translate(say("load of each expert, by step")), "name", 12))
    if has_pairs:
        parts.append(text(_LEFT + _MAP + _GAP, top - 10, translate(say("chosen together")), "name", 12))
    for layer in use.layers:
        parts += _band(layer, use.steps, top, has_pairs, translate)
        top += _SQUARE + _GAP
    parts += _curves(use, top + 40, translate)
    top += 40 + 180 + 66
    if use.sent_bytes:
        parts += _bytes(use.sent_bytes, top, translate)
        top += 30 + 26 * len(use.sent_bytes) + 10
    return document(label, _WIDTH, top, parts, style=STYLE + HEAT_STYLE)


def _band(layer: LayerUse, steps: Sequence[int], top: float, has_pairs: bool, translate: _Translate) -> list[str]:
    """A layer's name and figures, its load over the steps, and its pairs if any layer has them."""
    box = Box(_LEFT, top, _MAP, _SQUARE)
    name, number = say("layer {number}", number=layer.layer), say("{number} experts", number=layer.num_experts)
    parts = [text(20, top + 14, translate(name), "name", 12), text(20, top + 31, translate(number))]
    parts += heat_map(_load_rows(layer), box, "load")
    ends = ((top + 10, "0"), (box.bottom, f"{layer.num_experts - 1}"))
    parts += [text(_LEFT - 6, y, words, anchor="end") for y, words in ends]
    parts += x_axis(box, steps[0], steps[-1])
    x = box.right + _GAP
    if pairs := _pairs(layer):
        parts += heat_map(pairs, Box(x, top, _SQUARE, _SQUARE), "together")
        assert layer.together is not None
        parts.append(text(x, box.bottom + 15, translate(say("step {number}", number=layer.together[0]))))
    x += _SQUARE + 20 if has_pairs else 0
    figures = _figures(layer)
    return parts + [text(x, top + 14 + 19 * n, translate(words), size=12) for n, words in enumerate(figures)]


def _load_rows(layer: LayerUse) -> list[list[float]]:
    """[experts][steps]: load over mean. A column is the mean of its steps, a row the busiest of its experts."""
    mean_loads = [sum(load) / len(load) or 1.0 for load in layer.loads]
    columns = [
        [fmean(layer.loads[s][e] / mean_loads[s] for s in span) for e in range(layer.num_experts)]
        for span in _spans(len(layer.loads), _MOST_COLUMNS)
    ]
    return [[max(column[e] for e in span) for column in columns] for span in _spans(layer.num_experts, _MOST_ROWS)]


def _pairs(layer: LayerUse) -> list[list[float]]:
    """[first][second]: how often tokens of the first expert also chose the second, over the mean of all other experts.

    Empty if no two experts were chosen together, for example if each token has one expert.
    """
    if layer.together is None or not any(map(any, layer.together[1])):
        return []
    means = [sum(row) / (len(row) - 1) for row in layer.together[1]]
    return [
        [math.nan if i == j or not mean else count / mean for j, count in enumerate(row)]
        for i, (row, mean) in enumerate(zip(layer.together[1], means, strict=True))
    ]


def _spans(length: int, most: int) -> list[range]:
    """At most `most` ranges that cover 0 to `length`, as even as possible."""
    number = min(length, most)
    return [range(n * length // number, (n + 1) * length // number) for n in range(number)]


def _curves(use: ExpertUse, top: float, translate: _Translate) -> list[str]:
    """Three charts side by side, with a line for each layer."""
    chart_width = (_WIDTH - 20 - 3 * 56) / 3
    boxes = [Box(56 + n * (chart_width + 56), top, chart_width, 170) for n in range(3)]
    most_entropy = max(math.log(layer.num_experts) for layer in use.layers)
    loads, entropies, dropped = (_lines(use, name, translate) for name in ("largest_load", "entropy", "dropped_share"))
    titles = (
        translate(say("busiest expert / mean (dotted: 1.5)")),
        translate(say("entropy of scores, nats (dotted: even)")),
        translate(say("choices dropped")),
    )
    return [
        *LineChart(titles[0], boxes[0], loads, 2.0, mark=EVEN).drawn(),
        *LineChart(titles[1], boxes[1], entropies, most_entropy, most_entropy).drawn(),
        *LineChart(titles[2], boxes[2], dropped, 0.01, form=lambda share: f"{100 * share:.3g} %").drawn(),
        *legend(56, top + 170 + 40, loads if len(loads) <= len(LINE_COLOURS) else [loads[0], loads[-1]]),
    ]


def _colour(number: int, count: int) -> str:
    """The colour of a layer: one of LINE_COLOURS, or with many layers a mix from blue (first) to orange (last)."""
    if count <= len(LINE_COLOURS):
        return LINE_COLOURS[number]
    mixed = (round(a + (b - a) * number / (count - 1)) for a, b in zip(rgb("#3b82f6"), rgb("#f59f00"), strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _lines(use: ExpertUse, figure: str, translate: _Translate) -> list[Line]:
    """A line for each layer: the figure over the steps."""
    lines = []
    for number, layer in enumerate(use.layers):
        values = layer.figures[figure]
        spans = _spans(len(values), _MOST_COLUMNS)
        points = [(float(use.steps[span[-1]]), fmean(values[step] for step in span)) for span in spans]
        name = translate(say("layer {number}", number=layer.layer))
        lines.append(Line(name, points, _colour(number, len(use.layers))))
    return lines


def _bytes(sent_bytes: dict[str, tuple[float, float]], top: float, translate: _Translate) -> list[str]:
    """Bars of the bytes that all ranks sent in a step."""
    most_bytes = max(map(sum, sent_bytes.values())) or 1.0
    bar_width, bar_left = 480.0, 200.0
    title = say("bytes that all ranks sent in a step, by kind of link")
    parts = [text(20, top, translate(title), "name", 12)]
    for number, (purpose, by_link) in enumerate(sent_bytes.items()):
        x, y = bar_left, top + 14 + 26 * number
        parts.append(text(bar_left - 8, y + 13, translate(_PURPOSES[purpose]), anchor="end"))
        for num_bytes, colour in zip(by_link, LINE_COLOURS, strict=False):
            length = num_bytes / most_bytes * bar_width
            parts.append(f'<rect fill="{colour}" x="{px(x)}" y="{px(y)}" width="{px(length)}" height="17"/>')
            x += length
        inside, between = (bytes_text(round(num_bytes)) for num_bytes in by_link)
        amounts = say("inside nodes (blue) {inside}, between nodes (red) {between}", inside=inside, between=between)
        parts.append(text(x + 8, y + 13, translate(amounts)))
    return parts
