"""Search of the pages by words: sections that have them, the best first."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

from shardwright.config.phrase import below, say
from shardwright.config.text_columns import aligned
from shardwright.learn.idea_pages import FIRST, IDEAS, OTHERS, IdeaPage, terminal_text

# Of sections that have as much of a question the first is shown: one that it names, short answers, then ideas.
_IN_ORDER = (FIRST, *IDEAS, *(name for name in OTHERS if name != FIRST))
_MOST, _LEAST_SHARE = 6, 0.3  # sections that are shown, and their least score as a share of the best one's
_IN_HEADING = 4.0  # a word of a heading counts as several of the text
_OF_PART = 0.8  # "zero" of "zero-3"
_OF_CHARACTER = 0.25  # one Chinese character counts as a part of two neighbours, which mostly are a word
# Words that make a question one, and do not say about what.
_ASKING_WORDS = """
a an the of in on to for with and or is are be am was do does did done can could should would will i my me we our it its
this that these those there what which who why when where how much many so not no than then at by from
"""
_ASKING = frozenset(_ASKING_WORDS.split())
_ASKING_CHINESE = re.compile(
    "为什么|什么|怎么办|怎么样|怎么|怎样|如何|多少|几个|哪个|哪种|哪些|是不是|能不能|要不要|吗|呢|的|了|我|你"
)


@dataclass(frozen=True)
class PageSection:
    """A part of a page under one heading, which is the page's title at its beginning, as Markdown."""

    page: str
    heading: str
    markdown: str

    @property
    def prose(self) -> str:
        """The text without commands and their outputs, whose words are about other things as well."""
        return re.sub(r"^```.*?^```$", "", self.markdown, flags=re.MULTILINE | re.DOTALL)


def sections_with(words: str, language: str) -> list[PageSection]:
    """The sections that have most of some words; a word that few sections have counts more. [] if there are none."""
    sections = [section for name in _IN_ORDER for section in _sections(name, language)]
    headings, texts = ([getattr(section, part).lower() for section in sections] for part in ("heading", "prose"))
    scores = [0.0] * len(sections)
    pieces = _pieces(words.lower())
    for piece, share in pieces.items():
        pattern = re.compile(rf"(?<![a-z0-9]){re.escape(piece)}")
        headed, has = ([bool(pattern.search(text)) for text in where] for where in (headings, texts))
        if any(has):
            weight = share * log(1.0 + len(sections) / sum(has))
            for number, (is_headed, is_in) in enumerate(zip(headed, has, strict=True)):
                scores[number] += weight * (_IN_HEADING if is_headed else is_in)
    names_other = [not pieces.keys() >= _pieces(heading).keys() for heading in headings]
    ranked = sorted(zip(scores, names_other, sections, strict=True), key=lambda one: (-one[0], one[1]))
    best = [(score, section) for score, _, section in ranked[:_MOST]]
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


def _pieces(words: str) -> dict[str, float]:
    """The words that are searched for, with their weights: those in Latin letters, and of Chinese each two neighbours
    and, with less, each character. Words of asking count where there are no others."""
    latin = re.findall(r"[a-z0-9][a-z0-9.+-]*", words)
    told = _ASKING_CHINESE.sub(" ", words)
    if not re.search(r"[\u4e00-\u9fff]", told):
        told = words
    runs = re.findall(r"[\u4e00-\u9fff]+", told)
    pairs = {run[at : at + 2]: 1.0 for run in runs for at in range(max(1, len(run) - 1))}
    characters = {character: _OF_CHARACTER for run in runs for character in run}
    about = [word for word in latin if word not in _ASKING]
    parts = {part: _OF_PART for word in about for part in word.split("-") if len(part) > 1 and part not in _ASKING}
    return characters | pairs | parts | dict.fromkeys(about or ([] if runs else latin), 1.0)
