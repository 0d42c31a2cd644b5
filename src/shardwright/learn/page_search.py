"""Search of the pages by words: sections that have them, the best first."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

from shardwright.config.phrase import below, say
from shardwright.learn.idea_pages import IDEAS, OTHERS, IdeaPage, terminal_text
from shardwright.report.text_columns import aligned

_MOST, _LEAST_SHARE = 6, 0.3  # sections that are shown, and their least score as a share of the best one's
_IN_HEADING = 4.0  # a word of a heading counts as several of the text


@dataclass(frozen=True)
class PageSection:
    """A part of a page under one heading, which is the page's title at its beginning, as Markdown."""

    page: str
    heading: str
    markdown: str


def sections_with(words: str, language: str) -> list[PageSection]:
    """The sections that have most of some words; a word that few sections have counts more. [] if there are none."""
    sections = [section for name in (*OTHERS, *IDEAS) for section in _sections(name, language)]
    headings, texts = ([getattr(section, part).lower() for section in sections] for part in ("heading", "markdown"))
    scores = [0.0] * len(sections)
    for piece in _pieces(words.lower()):
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(piece)}")
        headed, has = ([bool(pattern.search(text)) for text in where] for where in (headings, texts))
        if any(has):
            weight = log(1.0 + len(sections) / sum(has))
            for number, (is_headed, is_in) in enumerate(zip(headed, has, strict=True)):
                scores[number] += weight * (_IN_HEADING if is_headed else is_in)
    best = sorted(zip(scores, sections, strict=True), key=lambda pair: -pair[0])[:_MOST]
    return [section for score, section in best if score > _LEAST_SHARE * best[0][0]]


def sections_text(sections: Sequence[PageSection]) -> str:
    """The best section, the headings of the others with their pages, and the command that reads a page."""
    best, *others = sections
    parts = [terminal_text(best.markdown)]
    if others:
        rows = [[section.page, section.heading] for section in others]
        parts.append(below([say("On the same words:"), aligned(rows, left=range(2))]))
    parts.append(say("the whole page: {command}", command=f"shardwright learn {best.page}"))
    return below([text for part in parts for text in (part, "")][:-1])


def _sections(name: str, language: str) -> Iterator[PageSection]:
    for part in re.split(r"^(?=##? )", IdeaPage(name, language).markdown, flags=re.MULTILINE):
        if part:
            yield PageSection(name, part.partition("\n")[0].lstrip("# "), part)


def _pieces(words: str) -> set[str]:
    """The words that are searched for: those in Latin letters, and of Chinese each two neighbours."""
    latin = set(re.findall(r"[a-z0-9][a-z0-9.+-]*", words))
    runs = re.findall(r"[\u4e00-\u9fff]+", words)
    return latin | {run[at : at + 2] for run in runs for at in range(max(1, len(run) - 1))}
