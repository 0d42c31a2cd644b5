"""Search of the pages by words: sections that have them, the best first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log

from shardwright.config.phrase import below, say
from shardwright.config.text_columns import aligned
from shardwright.learn.asked_words import SAME, SHORT_WORD, QuestionWords, asked, counted, num_words
from shardwright.learn.idea_pages import FIRST, IDEAS, OTHERS, TERMS, IdeaPage, joined, terminal_text

# Of sections that have as much of a question the first is shown: one that it names, short answers, then ideas.
_IN_ORDER = (FIRST, *IDEAS, *(name for name in OTHERS if name != FIRST))
_MOST, _LEAST_SHARE = 6, 0.3  # sections that are shown, and their least score as a share of the best one's
_IN_HEADING, _WORDS = 8.0, 7.0  # a word of a heading counts as several of the text; half, where it has so many words
_OF_LENGTH, _ENOUGH = 0.5, 1.2  # of BM25: how much long sections lose, and how soon more of a word adds little
_OF_PAGE = 0.3  # what a page's beginning has of the best of its sections
_OF_BEGINNING = 2.0  # of a page, if a question asks what something is
_OF_SHORT = 1.2  # a short answer
_OF_LIST, _LISTS = 0.5, ("Where it lives", "代码在哪里")  # they have words of everything, as terms have
_OF_LEANING = 0.5  # a question that leans on the one before it, after which it is shown
_OF_STORY, _STORIES = 0.8, ("contradictions", "cases", "told-story", "playbook")  # pages on much at once
_QUESTION = re.compile(
    r"^\*\*(?:Question|问题) (\d+)\.\*\* (.*?)(?:[ \n]?[(（]\[[^\]]+\]\(([a-z-]+)\.md\)[)）])?$", re.DOTALL
)
# These weights, as the site's search reads them.
SEARCH_WEIGHTS = {
    "most": _MOST,
    "in_heading": _IN_HEADING,
    "words": _WORDS,
    "of_length": _OF_LENGTH,
    "enough": _ENOUGH,
    "of_page": _OF_PAGE,
}
_LEANS = re.compile(r"(?i)^and |^why:|\b(?:of|to|carries) (?:that|it)\b|^(?:那|再|又|如果)|这时")
Index = dict[str, dict[int, float]]  # of each word, what it is worth in each section that has it


@dataclass(frozen=True)
class PageSection:
    """A part of a page under one heading, which is the page's title at its beginning, as Markdown. A question with its
    answer is such a part, too, under the question."""

    page: str
    heading: str
    markdown: str
    place: int  # among the headings of the page
    question: int = 0  # its number under the heading, 0 if it is none
    leans: bool = False  # a question that is not understood without the one before it
    idea: str = ""  # the page that explains it, if that is another

    @property
    def prose(self) -> str:
        """The text without commands and their outputs, whose words are about other things as well."""
        return re.sub(r"^```.*?^```$", "", self.markdown, flags=re.MULTILINE | re.DOTALL)


def sections_with(words: str, language: str) -> list[PageSection]:
    """The sections that have most of some words; a word that few sections have counts more. [] if there are none."""
    sections, index = section_index(language)
    question = asked(words)
    known = _known(question.weights, index)
    scores = [
        _score(number, index, known, question) * shares(section)[question.is_definition]
        for number, section in enumerate(sections)
    ]
    best = dict[str, float]()  # of each page, and of the questions that are asked of it elsewhere
    for section, score in zip(sections, scores, strict=True):
        for page in {section.page, section.idea}:
            best[page] = max(best.get(page, 0.0), score)
    ranked = sorted(
        (-(score + (_OF_PAGE * best[section.page] if section.place == 0 else 0.0)), number)
        for number, (section, score) in enumerate(zip(sections, scores, strict=True))
        if score
    )
    return [sections[number] for score, number in ranked[:_MOST] if score <= _LEAST_SHARE * ranked[0][0]]


def _known(weights: Mapping[str, float], index: Index) -> dict[str, float]:
    """Words of the index for those of a question: one that it lacks, such as a half one, stands for those it begins."""
    known = dict[str, float]()
    for word, weight in weights.items():
        is_half = word not in index and len(word) >= SHORT_WORD
        for one in (other for other in index if other.startswith(word)) if is_half else (word,):
            if one in index:
                known[one] = max(known.get(one, 0.0), weight)
    return known


def _score(number: int, index: Index, known: Mapping[str, float], question: QuestionWords) -> float:
    """The words of the question that section `number` has, or others that say the same; and more, if it has all."""

    def value(words: Sequence[str]) -> float:
        return sum(index.get(word, {}).get(number, 0.0) for word in words) / max(1, len(words))

    covered = {word for word in known if number in index[word]}
    score = sum(known[word] * index[word][number] for word in covered)
    more = dict[tuple[str, ...], float]()
    for own, others in question.same:
        same = (1.0 if question.is_definition else SAME) * max(map(value, others), default=0.0) - value(own)
        if same > 0.0:
            more[own] = max(more.get(own, 0.0), same)
            covered.update(word for word in own if word in known)
    score += sum(more.values())
    total = sum(known.values())
    return score * (0.5 + sum(known[word] for word in covered) / total) if total else score


def shares(section: PageSection) -> tuple[float, float]:
    """The weight of a section beside others; and its weight if a question asks what something is, which a page's
    beginning says. Lists have words of everything, so they count less."""
    if section.page in _STORIES:
        return _OF_STORY, _OF_STORY
    if section.page == TERMS or section.heading in _LISTS or (section.page == FIRST and not section.place):
        return _OF_LIST, _OF_LIST
    share = _OF_SHORT if section.page == FIRST else _OF_LEANING if section.leans else 1.0
    return share, share if section.place else _OF_BEGINNING


@cache
def section_index(language: str) -> tuple[list[PageSection], Index]:
    """All sections in order, and what each word is worth in each section that has it, as BM25 weighs it."""
    sections = [section for name in _IN_ORDER for section in _sections(name, language)]
    counts = list[dict[str, float]]()
    lengths = list[float]()
    for section in sections:
        count: dict[str, float] = dict(counted(section.prose))
        lengths.append(sum(count.values()))
        for word in counted(section.heading):
            count[word] = count.get(word, 0.0) + _IN_HEADING * _WORDS / (_WORDS + num_words(section.heading))
        counts.append(count)
    mean = sum(lengths) / len(lengths)
    having = dict[str, int]()
    for count in counts:
        for word in count:
            having[word] = having.get(word, 0) + 1
    index: Index = {word: {} for word in having}
    for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        enough = _ENOUGH * (1.0 - _OF_LENGTH + _OF_LENGTH * length / mean)
        for word, often in count.items():
            index[word][number] = log(1.0 + len(sections) / having[word]) * often / (often + enough)
    return sections, index


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
    for place, part in enumerate(re.split(r"^(?=##? [^-])", IdeaPage(name, language).markdown, flags=re.MULTILINE)[1:]):
        heading = part.partition("\n")[0].lstrip("# ")
        rest, *asked_here = re.split(r"^(?=\*\*(?:Question|问题) \d+\.\*\* )", part, flags=re.MULTILINE)
        if not asked_here or place == 0:
            yield PageSection(name, heading, rest, place)
        for number, one in enumerate(asked_here):
            paragraph, _, _ = one.partition("\n\n")
            told = _QUESTION.match(paragraph)
            assert told is not None, paragraph
            text = joined(told[2])
            before = asked_here[number - 1] if number and _LEANS.search(text) else ""
            yield PageSection(name, text, before + one, place, int(told[1]), bool(before), told[3] or "")
