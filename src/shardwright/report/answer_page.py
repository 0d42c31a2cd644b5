"""The answer of a command as a page: made of what its `--json` prints, and of nothing else."""

from typing import Any

from shardwright.report.page_document import main_of, page_document
from shardwright.report.step_cost import PARTS

_SECTIONS = (
    ("step", "Where a step's time goes"),
    ("by-rank", "Memory by rank"),
    ("money", "Money, energy, failures"),
    ("rest", "The answer"),
)
_FOOTER = "All of this page stands in this one file. Times, memory and money are predictions."
_MEANINGS = {
    "mfu": "model FLOPs of a step over those of the devices' peak",
    "hfu": "FLOPs that are computed, with those computed again, over those of the devices' peak",
    "fits": "every rank fits its device",
}


def answer_page(title: str, command: str, answer: Any) -> str:
    """One HTML file with the answer, a dictionary or a list of dictionaries, to a command."""
    body = main_of(title, command, _SECTIONS, _FOOTER)
    return page_document(
        f"{title} – Shardwright", body, {"answer": answer, "words": PARTS, "fields": _MEANINGS}, "answer.js"
    )
