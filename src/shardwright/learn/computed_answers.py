"""Questions with answers that a command computes, as a table: each language asks its own, on its page of them."""

import re
from dataclasses import dataclass

from shardwright.learn.idea_pages import QUESTIONS, IdeaPage, joined

_ENTRY = re.compile(
    r"^\*\*(?:Question|问题) (?P<number>\d+)\.\*\* (?P<question>.*?)[ \n]?"
    r"[(（]\[[^\]]+\]\((?P<idea>[a-z-]+)\.md\)[)）]\n\n"
    r"```sh\n(?P<command>.*?)\n```\n\n```text\n(?P<output>.*?)```\n\n"
    r"\*\*(?:Answer:|答：)\*\* (?P<answer>.*?)(?:\n\n|\n?\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class ComputedAnswer:
    """A question, the page that explains it, the command that answers it with its output, and the answer in words."""

    number: int
    question: str
    idea: str
    command: str
    output: str
    answer: str


def questions_of(language: str) -> list[ComputedAnswer]:
    """The questions of a language, in the order of its page."""
    entries = _ENTRY.finditer(IdeaPage(QUESTIONS, language).markdown)
    return [
        ComputedAnswer(
            number=int(entry["number"]),
            question=joined(entry["question"]),
            idea=entry["idea"],
            command=entry["command"],
            output=entry["output"],
            answer=joined(entry["answer"]),
        )
        for entry in entries
    ]
