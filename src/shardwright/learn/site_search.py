"""Hooks of mkdocs: each language searches its own pages, from files as well, as `shardwright learn WORDS` does.

The theme's search has one index for all languages, and takes for a word what stands between two spaces. In its place is
player/search_worker.js, which ranks sections as `page_search` does, by the same words and weights.
"""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

from shardwright.learn import asked_words
from shardwright.learn.idea_pages import LANGUAGES, language_of, terminal_text
from shardwright.learn.page_search import SEARCH_WEIGHTS, section_index, shares

_INDEX = Path("search", "search_index.json")
_LAST = -1000  # after the plugin of languages, which joins the indices of all
_WORKER = "play/search_worker.js"
_TEASER = 220  # characters of a section's text that a result shows
_QUESTION = re.compile(r"^(\*\*(?:Question|问题) (\d+)\.\*\*)", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose questions can be linked, each by its number."""
    return _QUESTION.sub(r'<span id="question-\2"></span>\1', markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """A page that is searched by our ranking; in another language than the first in the folder of its language."""
    worker = _WORKER if language_of(page.url) == LANGUAGES[0] else f"../{_WORKER}"
    output = re.sub(r'"search": "[^"]*"', f'"search": "{worker}"', output, count=1)
    return output if language_of(page.url) == LANGUAGES[0] else output.replace('"base": ".."', '"base": "."', 1)


@event_priority(_LAST)
def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the index of each language, as JSON and as a script."""
    site = Path(config["site_dir"])
    docs = json.loads((site / _INDEX).read_text(encoding="utf-8"))["docs"]
    for language in LANGUAGES:
        folder = "" if language == LANGUAGES[0] else f"{language}/"
        places = dict[str, list[str]]()  # of each page, the addresses of its headings
        for doc in docs:
            if language_of(doc["location"]) == language:
                location = doc["location"].removeprefix(folder)
                places.setdefault(location.partition(".html")[0], []).append(location)
        if not places:  # each language is a build of its own, and the last one has all
            continue
        index = {"config": {"tables": _tables()}, "docs": list(_documents(language, places))}
        content = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
        file = site / folder / _INDEX
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
        file.with_suffix(".js").write_text(f"var __index = {content};\n", encoding="utf-8")  # for pages opened as files
        sitemap = site / folder / "sitemap.xml"
        if not sitemap.exists():  # the theme asks for one in the folder of each language
            sitemap.write_text("<urlset/>\n", encoding="utf-8")


def _documents(language: str, places: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """The sections of a language as the worker reads them, with their addresses."""
    for section in section_index(language)[0]:
        location = places[section.page][section.place]
        if section.question:
            location = f"{section.page}.html#question-{section.question}"
        text = " ".join(terminal_text(section.prose.partition("\n\n")[2]).split())
        yield {
            "location": location,
            "title": section.heading,
            "text": section.prose,
            "teaser": escape(text[:_TEASER] + ("…" if len(text) > _TEASER else "")),
            "page": section.page,
            "idea": section.idea,
            "place": section.place,
            "shares": shares(section),
        }


def _tables() -> dict[str, Any]:
    """The words and weights of a question, which are those of `learn WORDS`."""
    return SEARCH_WEIGHTS | {
        "asking": sorted(asked_words.ASKING),
        "asking_chinese": asked_words.ASKING_CHINESE,
        "case": asked_words.CASE,
        "definition": asked_words.DEFINITION,
        "endings": asked_words.ENDINGS,
        "same": asked_words.same_words(),
        "same_share": asked_words.SAME,
        "character": asked_words.CHARACTER,
        "unknown": asked_words.UNKNOWN,
        "part": asked_words.PART,
        "of_a_case": asked_words.OF_A_CASE,
        "short_word": asked_words.SHORT_WORD,
    }
