"""Timelines as one HTML file that needs nothing else: no network, no server, no library.

Names, figures and tables are HTML. painter.js draws the timelines on canvases, from numbers in the page, so that
thousands of actions can be zoomed and moved smoothly. All timelines of a page share one time scale.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from itertools import accumulate
from typing import Any

from shardwright.config.phrase import ENGLISH, fixed, in_language, say, spoken
from shardwright.report.timeline.colours import NAMES, SHADES, letters_of, shade
from shardwright.report.timeline.packed_timeline import Colours, packed_timeline
from shardwright.report.timeline.schedule_figures import comparison, figures, idle_table, memory_table
from shardwright.report.timeline.study import Study
from shardwright.simulate.timeline import Timeline
from shardwright.simulate.waits import Cause


@dataclass(frozen=True)
class Section:
    """One timeline of a page.

    `figures` are (name, value, meaning); `table` (idle time) and `memory` are by rank, with a header first. `unit` of
    times is "s", or empty for forwards of a stage. `tail` are the parts of a step that follow its actions, as (name in
    WORDS, seconds). `exposed` are shares of computations, by
    letter and stage, that communication takes which nothing hides.
    """

    name: str
    note: str
    timeline: Timeline
    figures: Sequence[tuple[str, str, str]] = ()
    table: Sequence[Sequence[str]] = ()
    memory: Sequence[Sequence[str]] = ()
    unit: str = ""
    tail: Sequence[tuple[str, float]] = ()
    exposed: Mapping[str, Sequence[float]] = field(default_factory=dict)


# Texts that the scripts write on a timeline; fields are in braces.
WORDS = {
    "rank": "rank",
    "keeps": "keeps",
    "idle": "idle",
    "warm-up": "before its first computation",
    "drain": "after its last computation",
    "dependency": "another rank has yet to compute",
    "communication": "a message is on its way",
    "data": "gradients and parameters of replicas",
    "optimizer": "optimizer",
    "host": "on the way to host memory and there",
    "other": "host, jitter, norm of gradients",
    "ofMicrobatch": "{name} of microbatch {microbatch}, stage {stage}",
    "ofStage": "{name} of stage {stage}",
    "times": "{lane}, {from} to {to}, takes {takes}",
    "kept": "activations kept: {activations}, messages buffered: {messages}",
    "inputs": "stage inputs kept: {count}",
    "gathered": "stages gathered: {count}",
    "play": "play",
    "pause": "pause",
    "now": "{time}: {busy} of {lanes} lanes compute, {waiting} wait for a message, {idle} wait for others.",
    "begins": "Begins:",
}
_PACES = (6, 20, 60, 180)  # seconds in which a whole timeline is played


def section_of(study: Study, note: str = "") -> Section:
    """The section of a study, with all its figures."""
    return Section(
        study.name,
        note or study.shape,
        study.timeline,
        figures(study),
        table=idle_table(study),
        memory=memory_table(study),
        unit=study.unit,
    )


def timeline_page(
    title: str, sections: Sequence[Section], note: str = "", studies: Sequence[Study] = (), language: str = ENGLISH
) -> str:
    """The HTML page in a language. With `studies`, a table that compares them comes first."""
    title, note = in_language(title, language), in_language(note, language)
    without_script = say("The timelines are drawn by a script in this page; the figures need none.")
    rows, label = _spoken(comparison(studies), language), in_language(say("table"), language)
    lines = [
        "<!doctype html>",
        f'<html lang="{language}"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>" + (f"<p>{escape(note)}</p>" if note else "") + "</header><main>",
        _table(rows, label, "comparison", link=True) if studies else "",
        controls_html(sections, language),
        *(_section_html(number, section, language) for number, section in enumerate(sections)),
        f"</main><noscript>{in_language(without_script, language)}</noscript>",
        '<div id="tip" role="tooltip" hidden></div>',
        f'<script type="application/json" id="data">{embedded(spoken(drawn_data(sections), language))}</script>',
        f"<script>{''.join(map(_asset, SCRIPTS))}{_SHOW}</script></body></html>\n",
    ]
    return "\n".join(part for part in lines if part)


SCRIPTS = ("unpack.js", "painter.js", "player.js", "page.js")
_SHOW = "showTimelines(unpackedTimelines(JSON.parse(document.getElementById('data').textContent)), document);"


def drawn_data(sections: Sequence[Section]) -> dict[str, Any]:
    """The numbers that unpack.js reads: the timelines, which have one unit, and the colours and words that they refer
    to."""
    colours: Colours = {}
    data: dict[str, Any] = {
        "sections": [_section_data(section, colours) for section in sections],
        "causes": [str(cause) for cause in Cause],
        "names": {letter: fixed(name) for letter, name in NAMES.items()},
        "words": {key: fixed(words) for key, words in WORDS.items()},
        "unit": sections[0].unit,
    }
    return data | {"colours": [list(pair) for pair in colours]}


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def embedded(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _section_html(number: int, section: Section, language: str) -> str:
    cards = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value, meaning in _spoken(section.figures, language)
    )
    label = say("Timeline of {name}: {count} ranks", name=section.name, count=len(section.timeline.ranks))
    name, note, spoken_label = (in_language(text, language) for text in (section.name, section.note, label))
    tables = ((say("Idle time by rank and cause"), section.table), (say("Memory by rank and kind"), section.memory))
    details = "".join(
        f"<details><summary>{title}</summary>{_table(_spoken(rows, language), title)}</details>"
        for title, rows in ((in_language(title, language), rows) for title, rows in tables)
        if rows
    )
    return (
        f'<section id="s{number}"><h2>{escape(name)} <small>{escape(note)}</small></h2>'
        f'<dl class="figures">{cards}</dl>'
        f'<canvas data-section="{number}" tabindex="0" role="img" aria-label="{escape(spoken_label)}"></canvas>'
        f"{details}</section>"
    )


def _spoken(rows: Sequence[Sequence[str]], language: str) -> list[list[str]]:
    """The cells of rows in a language."""
    return [[in_language(cell, language) for cell in row] for row in rows]


def _table(rows: Sequence[Sequence[str]], label: str, name: str = "by-rank", link: bool = False) -> str:
    """A table that a narrow window scrolls, with a label for those who hear the page."""
    header, *body = rows

    def row_header(number: int, text: str) -> str:
        return f'<th scope="row"><a href="#s{number}">{escape(text)}</a></th>' if link else f"<th>{escape(text)}</th>"

    lines = [
        f"<tr>{row_header(n, row[0])}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for n, row in enumerate(body)
    ]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    table = f'<table class="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(label)}">{table}</div>'


def controls_html(sections: Sequence[Section], language: str = ENGLISH) -> str:
    """The legend of the actions that occur, the switches, and a hint on zooming, in a language."""
    several = len(sections) > 1
    zooming = say("Click a timeline, then wheel zooms, or two fingers") if several else say("Wheel or two fingers zoom")
    hint = say(
        "{zooming}, drag moves, double click goes back; point at a block for its messages. Space plays, ← and → step.",
        zooming=zooming,
    )
    items, switches = "".join(_legend(sections, language)), _switches(language)
    hint_text = in_language(hint, language)
    return f'<nav><div class="legend">{items}</div><p>{hint_text}</p><div class="switches">{switches}</div></nav>'


def _legend(sections: Sequence[Section], language: str) -> list[str]:
    """The meanings of colours and marks, as HTML."""

    def words(text: str) -> str:
        return in_language(text, language)

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
        items.append(f"<span>{swatches}{words(fixed(NAMES[letter]))}</span>")
    if "O" in letters:
        gradient = f"linear-gradient({shade('F', 0, 1)} 50%,{shade('B', 0, 1)} 50%)"
        items.append(f'<span><i style="background:{gradient}"></i>{words(say("both as one"))}</span>')
    if max(letters.values(), default=1) > 1:
        items.append(f"<span>{words(say('lighter: later chunk or other direction'))}</span>")
    items += [
        f'<span><i class="wait"></i>{words(say("waits for a computation"))}</span>',
        f'<span><i class="wire"></i>{words(say("waits for a message"))}</span>',
        f'<span><i class="kept"></i>{words(say("activations kept"))}</span>',
        f'<span><i class="buffered"></i>{words(say("messages buffered"))}</span>',
    ]
    if "C" in letters:
        items.append(f'<span><i class="inputs"></i>{words(say("stage inputs kept"))}</span>')
    if any(section.exposed for section in sections):
        items.append(f'<span><i class="foot"></i>{words(say("of it, communication that nothing hides"))}</span>')
    parts = dict.fromkeys(part for section in sections for part, _ in section.tail)
    return items + [
        f'<span><i style="background:var(--{part})"></i>{words(fixed(WORDS[part]))}</span>' for part in parts
    ]


def _switches(language: str) -> str:
    """The buttons and choices below the legend, as HTML."""
    paces = "".join(f'<option{" selected" * (pace == _PACES[1])} value="{pace}">{pace} s</option>' for pace in _PACES)
    texts = (
        say("one event back"),
        say("one event on"),
        say("all in"),
        say("all messages"),
        say("memory"),
        say("show all"),
    )
    back, on, all_in, messages, memory, whole = (in_language(text, language) for text in texts)
    return (
        f'<span class="player"><button type="button" id="step-back" aria-label="{back}">◂</button>'
        f'<button type="button" id="play">{in_language(fixed(WORDS["play"]), language)}</button>'
        f'<button type="button" id="step-on" aria-label="{on}">▸</button>'
        f'<label>{all_in} <select id="pace">{paces}</select></label></span>'
        f'<label><input type="checkbox" id="arrows">{messages}</label>'
        f'<label><input type="checkbox" id="memory" checked>{memory}</label>'
        f'<button type="button" id="whole">{whole}</button>'
    )


def _section_data(section: Section, colours: Colours) -> dict[str, Any]:
    ends = list(accumulate((seconds for _, seconds in section.tail), initial=section.timeline.makespan))
    tail = [[ends[n], ends[n + 1], name] for n, (name, _) in enumerate(section.tail)]
    return packed_timeline(section.timeline, colours) | {"tail": tail, "exposed": section.exposed}
