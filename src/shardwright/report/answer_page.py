"""The answer of a command as a page: made of what its `--json` prints, and in a notebook of its text too."""

from typing import Any

from shardwright.config.phrase import ENGLISH, say
from shardwright.report.answer_names import ANSWER_NAMES
from shardwright.report.page_document import main_of, page_document
from shardwright.report.step_cost import part_words

_SECTIONS = (
    ("step", say("Where a step's time goes")),
    ("by-rank", say("Memory by rank")),
    ("money", say("Money, energy, failures")),
    ("printed", say("In words")),
    ("rest", say("The answer")),
)
_FOOTER = say("All of this page stands in this one file. Times, memory and money are predictions.")
_MEANINGS = {
    "mfu": say("model FLOPs of a step over those of the devices' peak"),
    "hfu": say("FLOPs that are computed, with those computed again, over those of the devices' peak"),
    "fits": say("every rank fits its device"),
}


def answer_page(
    title: str, command: str, answer: Any, language: str = ENGLISH, *, text: str = "", lines: str = ""
) -> str:
    """One HTML file with the answer, a dictionary or a list of dictionaries, to a command, and with its `text` as it is
    printed, if there is one. `lines` are the same text with no line broken, which narrow screens break themselves. Its
    own words, the names of values, and sentences of the answer that are phrases are in a language."""
    body = main_of(title, command, _SECTIONS, _FOOTER, language)
    data = {
        "answer": answer,
        "text": text,
        "lines": lines,
        "words": part_words(),
        "fields": _MEANINGS,
        "names": ANSWER_NAMES,
    }
    return page_document(f"{title} – Shardwright", body, data, "answer.js", language)
