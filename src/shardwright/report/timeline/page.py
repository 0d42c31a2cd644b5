"""Timelines as one HTML file that needs nothing else: no network, no server, no library.

Names, figures and tables are HTML. painter.js draws the timelines on canvases, from numbers in the page, so that
thousands of actions can be zoomed and moved smoothly. All timelines of a page share one time scale.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from shardwright.report.timeline.colours import NAMES, SHADES, chunk_of, ink_on, letters_of, shade
from shardwright.report.timeline.schedule_figures import comparison, figures, idle_table, memory_table
from shardwright.report.timeline.study import Study
from shardwright.report.timeline.trace import messages
from shardwright.schedule.action import COMPUTE, Action
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.simulate.buffer_curves import Curve
from shardwright.simulate.timeline import Cause, RankTimeline, Resource, Span, Timeline


@dataclass(frozen=True)
class Section:
    """One timeline of a page.

    `figures` are (name, value, meaning); `table` (idle time) and `memory` are by rank, with a header first.
    """

    name: str
    note: str
    timeline: Timeline
    figures: Sequence[tuple[str, str, str]] = ()
    table: Sequence[Sequence[str]] = ()
    memory: Sequence[Sequence[str]] = ()


_Colours = dict[tuple[str, str], int]  # the number of each pair (ground, ink) in use


def section_of(study: Study, note: str = "") -> Section:
    """The section of a study, with all its figures."""
    tables = {"table": idle_table(study), "memory": memory_table(study)}
    return Section(study.name, note or study.shape, study.timeline, figures(study), **tables)


def timeline_page(title: str, sections: Sequence[Section], note: str = "", studies: Sequence[Study] = ()) -> str:
    """The HTML page. With `studies`, a table that compares them comes first."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>" + (f"<p>{escape(note)}</p>" if note else "") + "</header><main>",
        _table(comparison(studies), "comparison", link=True) if studies else "",
        controls_html(sections),
        *(_section_html(number, section) for number, section in enumerate(sections)),
        "</main><noscript>The timelines are drawn by a script in this page; the figures need none.</noscript>",
        '<div id="tip" role="tooltip" hidden></div>',
        f'<script type="application/json" id="data">{embedded(drawn_data(sections))}</script>',
        f"<script>{_asset('painter.js')}{_asset('page.js')}{_SHOW}</script></body></html>\n",
    ]
    return "\n".join(part for part in lines if part)


_SHOW = "showTimelines(JSON.parse(document.getElementById('data').textContent), document);"


def drawn_data(sections: Sequence[Section]) -> dict[str, Any]:
    """The numbers that painter.js draws: the timelines, and the colours and words that they refer to."""
    colours: _Colours = {}
    data: dict[str, Any] = {
        "sections": [_section_data(section.timeline, colours) for section in sections],
        "causes": [str(cause) for cause in Cause],
        "names": NAMES,
    }
    return data | {"colours": [list(pair) for pair in colours]}


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def embedded(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _section_html(number: int, section: Section) -> str:
    cards = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value, meaning in section.figures
    )
    ranks = len(section.timeline.ranks)
    tables = (("Idle time by rank and cause", section.table), ("Memory by rank and kind", section.memory))
    details = "".join(f"<details><summary>{name}</summary>{_table(rows)}</details>" for name, rows in tables if rows)
    return (
        f'<section id="s{number}"><h2>{escape(section.name)} <small>{escape(section.note)}</small></h2>'
        f'<dl class="figures">{cards}</dl>'
        f'<canvas data-section="{number}" tabindex="0" role="img" '
        f'aria-label="Timeline of {escape(section.name)}: {ranks} ranks"></canvas>'
        f"{details}</section>"
    )


def _table(rows: Sequence[Sequence[str]], name: str = "by-rank", link: bool = False) -> str:
    header, *body = rows

    def row_header(number: int, text: str) -> str:
        return f'<th scope="row"><a href="#s{number}">{escape(text)}</a></th>' if link else f"<th>{escape(text)}</th>"

    lines = [
        f"<tr>{row_header(n, row[0])}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for n, row in enumerate(body)
    ]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f'<table class="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def controls_html(sections: Sequence[Section]) -> str:
    """The legend of the actions that occur, the switches, and a hint on zooming."""
    letters: dict[str, int] = {}
    for section in sections:
        for letter, num_chunks in letters_of(section.timeline).items():
            letters[letter] = max(letters.get(letter, 1), num_chunks)
    items = []
    for letter in (letter for letter in SHADES if letter in letters):
        num_chunks = letters[letter]
        swatches = "".join(
            f'<i style="background:{shade(letter, chunk, num_chunks)}"></i>' for chunk in range(num_chunks)
        )
        items.append(f"<span>{swatches}{NAMES[letter]}</span>")
    if "O" in letters:
        gradient = f"linear-gradient({shade('F', 0, 1)} 50%,{shade('B', 0, 1)} 50%)"
        items.append(f'<span><i style="background:{gradient}"></i>both as one</span>')
    if max(letters.values(), default=1) > 1:
        items.append("<span>lighter: later chunk or other direction</span>")
    items += [
        '<span><i class="wait"></i>waits for a computation</span>',
        '<span><i class="wire"></i>waits for a message</span>',
        '<span><i class="kept"></i>activations kept</span>',
        '<span><i class="buffered"></i>messages buffered</span>',
    ]
    if "C" in letters:
        items.append('<span><i class="inputs"></i>stage inputs kept</span>')
    switches = (
        '<label><input type="checkbox" id="arrows">all messages</label>'
        '<label><input type="checkbox" id="memory" checked>memory</label>'
        '<button type="button" id="whole">show all</button>'
    )
    several = len(sections) > 1
    zooming = "Click a timeline, then wheel zooms" if several else "Wheel zooms"
    hint = f"{zooming}, drag moves, double click goes back; point at a block for its messages."
    return f'<nav><div class="legend">{"".join(items)}</div><p>{hint}</p><div class="switches">{switches}</div></nav>'


def _section_data(timeline: Timeline, colours: _Colours) -> dict[str, Any]:
    places = max(0, 7 - len(f"{timeline.makespan:.0f}")) if timeline.makespan >= 1 else 12
    ranks = [_rank_data(timeline, row, colours, places) for row in timeline.ranks]
    message_rows = []
    for message in messages(timeline):
        times = _round((message.send.start, message.send.end, message.receive.end), places)
        message_rows.append([message.sender, message.receiver, int(message.backward), *times, *message.about])
    return {"makespan": timeline.makespan, "ranks": ranks, "messages": message_rows}


def _rank_data(timeline: Timeline, row: RankTimeline, colours: _Colours, places: int) -> dict[str, Any]:
    causes = list(Cause)
    collective_resources = (Resource.COLLECTIVES, Resource.RELEASE) if timeline.program.gathers else ()

    def block(span: Span) -> list[Any]:
        parts = [_part_data(timeline, part, colours) for part in span.action.computes() or (span.action,)]
        return [*_round((span.start, span.end), places), parts, span.step]

    return {
        "busy": [block(s) for s in row.spans if s.resource is Resource.COMPUTE and s.end > s.start],
        "idle": [[*_round((gap.start, gap.end), places), causes.index(gap.cause)] for gap in row.idle],
        "alive": _curve(row.kept[Buffer.ACTIVATIONS].count, places),
        "buffered": _curve(row.kept[Buffer.MESSAGE].count, places),
        "inputs": _curve(row.kept[Buffer.INPUT].count, places),
        "gathered": _curve(row.kept[Buffer.PARAMETERS].count, places),
        "moves": [block(span) for span in row.spans if span.resource in collective_resources],
    }


def _part_data(timeline: Timeline, part: Action, colours: _Colours) -> list[Any]:
    """[colour, letter, stage, microbatch]."""
    letter = str(part.kind)
    ground = shade(letter, *(chunk_of(timeline.program, part) if part.kind in COMPUTE else (0, 1)))
    number = colours.setdefault((ground, ink_on(ground)), len(colours))
    return [number, letter, part.stage, part.microbatch]


def _curve(curve: Curve, places: int) -> list[list[float]]:
    """The points [time, count] of a curve, without changes that last no time."""
    points: dict[float, int] = {}
    for time, count in curve:
        points[round(time, places)] = count
    return [[time, count] for time, count in points.items()]


def _round(times: Sequence[float], places: int) -> list[float]:
    return [round(time, places) for time in times]
