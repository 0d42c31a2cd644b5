"""One HTML file that needs nothing else: styles, modules and data stand in it, and nothing is loaded from anywhere.

The modules of `report/page` are those that the planning page gets from its server. Here each is a data URL, to which an
import map leads by the module's name.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from shardwright.config.phrase import ENGLISH, in_language, say, spoken, template_in
from shardwright.report.timeline.page import SCRIPTS, embedded

BEGINNING = "<!doctype html>\n<html lang="  # of every page: by it a page is told from another file
_SAID = re.compile(r'\bsay\("((?:[^"\\]|\\.)*)"((?:\s*\+ "(?:[^"\\]|\\.)*")*)')
_IMPORT = re.compile(r'from "\./([a-z_]+\.js)"')
_NO_SCRIPT = say("This page is drawn by a script that stands in it; nothing is loaded.")
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_STYLES = ("page.css", "components.css", "report.css")


def page_document(title: str, body: str, data: dict[str, Any], module: str, language: str = ENGLISH) -> str:
    """The document with a `body` of HTML, whose `module` of `report/page` shows the data in a language."""
    styles = "\n".join(_asset(name).read_text(encoding="utf-8") for name in _STYLES)
    scripts = "\n".join(_asset(name).read_text(encoding="utf-8") for name in SCRIPTS)
    texts = [_asset(name).read_text(encoding="utf-8") for name in modules_of(module)]
    modules = {name: _data_url(name) for name in modules_of(module)}
    return "\n".join(
        [
            f'{BEGINNING}"{language}"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{escape(title)}</title><link rel="icon" href="data:,">',
            f"<style>{styles}</style>",
            f'<script type="importmap">{json.dumps({"imports": modules})}</script></head><body>',
            body,
            f"<noscript>{escape(in_language(_NO_SCRIPT, language))}</noscript>",
            '<div id="tip" role="tooltip" hidden></div>',
            f'<script type="application/json" id="phrases">{embedded(phrases_said(texts, language))}</script>',
            f'<script type="application/json" id="data">{embedded(spoken(data, language))}</script>',
            f'<script>{scripts}</script><script type="module">import "{module}";</script></body></html>\n',
        ]
    )


def modules_of(module: str) -> list[str]:
    """The names of a module of `report/page` and of all that it imports."""
    names, unread = dict[str, None](), [module]
    while unread:
        name = unread.pop()
        if name not in names:
            names[name] = None
            unread += _IMPORT.findall(_asset(name).read_text(encoding="utf-8"))
    return list(names)


def templates_said(script: str) -> list[str]:
    """The templates that a script says: `say("...")`, whose text may go on with `+ "..."`."""
    return [json.loads(f'"{first}{"".join(re.findall(_QUOTED, more))}"') for first, more in _SAID.findall(script)]


def phrases_said(scripts: Iterable[str], language: str) -> dict[str, str]:
    """The translations of what scripts say, by their English templates; none in English."""
    templates = [template for script in scripts for template in templates_said(script)]
    others = {template: template_in(template, language) for template in templates}
    return {template: other for template, other in others.items() if other != template}


def section(key: str, title: str) -> str:
    """An empty section that a module fills and shows. The parts of timelines are outside of what is filled."""
    legends = '<div class="legends"></div>' if key == "timeline" else ""
    heading = f"<h2>{escape(title)} <small></small></h2>"
    return f'<section id="{key}" hidden>{heading}{legends}<div class="body"></div></section>'


def main_of(title: str, words: str, sections: Sequence[tuple[str, str]], footer: str, language: str = ENGLISH) -> str:
    """A body in a language: a title, words below it, figures and messages, and sections of (key, title)."""
    title, words, footer = (in_language(text, language) for text in (title, words, footer))
    return "\n".join(
        [
            f'<header><div class="title"><h1>{escape(title)}</h1><p>{escape(words)}</p></div></header>',
            '<main><dl id="headline"></dl><div id="messages"></div>',
            *(section(key, in_language(heading, language)) for key, heading in sections),
            f"</main><footer>{escape(footer)}</footer>",
        ]
    )


def _asset(name: str) -> Traversable:
    reports = resources.files(__package__)
    return reports / ("timeline" if name in (*SCRIPTS, "page.css") else "page") / name


def _data_url(name: str) -> str:
    text = _IMPORT.sub(r'from "\1"', _asset(name).read_text(encoding="utf-8"))
    return f"data:text/javascript;base64,{b64encode(text.encode()).decode()}"
