"""Runs the commands of the pages that teach, and writes what they print and draw.

    python tests/support/learn_pages.py              # write the outputs and figures of all pages
    python tests/support/learn_pages.py zero mesh    # of these

A page has each command as a block of `sh`, followed by a block of `text` with its output. A picture has a name of
shardwright/learn/idea_figures.py.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.learn.idea_figures import FIGURES
from shardwright.learn.idea_pages import IDEAS, LANGUAGES, OTHERS, PAGES, IdeaPage

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.computed_once import computed_once

BLOCK = re.compile(r"^```sh\n(?P<command>.*?)\n```\n\n```text\n(?P<output>.*?)```$", re.MULTILINE | re.DOTALL)
ANSWER = re.compile(r"^\*\*(?:Answer:|答：)\*\*.*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![a-zA-Z\d.,-])\d[\d,]*(?:\.\d+)?(?<!,)")
PICTURE = re.compile(r"!\[[^\]]*\]\(figures/([a-z0-9-]+)\.svg\)")


def commands(markdown: str) -> list[str]:
    """The commands of a page."""
    return [block["command"] for block in BLOCK.finditer(markdown)]


def pictures(markdown: str) -> list[str]:
    """The names of the figures of a page."""
    return PICTURE.findall(markdown)


@cache
def output_of(command: str, locale: str = "C.UTF-8") -> str:
    """The standard output of a command, or its faults, through the programs that it is piped into."""
    own, _, others = command.replace("\\\n", " ").partition(" | ")
    output = _printed(" ".join(own.split()), locale)
    if others:
        done = subprocess.run(["bash", "-c", others], input=output, capture_output=True, check=True, text=True)
        output = done.stdout
    return re.sub(r"[ \t]+$", "", output, flags=re.MULTILINE).strip("\n") + "\n"


@cache
def _printed(own: str, locale: str) -> str:
    """The output of a command of ours, once for all the programs that read it."""
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {own}"], capture_output=True, check=True, text=True).stdout
    name, *arguments = words.split("\0")[:-1]
    assert name == "shardwright", own
    try:
        with computed_once():
            result = CliRunner(env={"LC_ALL": locale}).invoke(cli, arguments, catch_exceptions=True)
        if isinstance(result.exception, PlanError):
            raise result.exception
        assert result.exit_code == 0, (own, result.output, result.exception)
    except PlanError as error:
        return f"{error}\n"
    return click.unstyle(result.stdout)


def filled(markdown: str) -> str:
    """A page with the outputs that its commands have now, and with the numbers of its answers from there."""
    changes = [(block.end(), block["output"], output_of(block["command"])) for block in BLOCK.finditer(markdown)]

    def answered(answer: re.Match[str]) -> str:
        before = [(old, new) for end, old, new in changes if end <= answer.start()]
        return NUMBER.sub(lambda number: renewed(number[0], before), answer[0])

    return BLOCK.sub(
        lambda block: f"```sh\n{block['command']}\n```\n\n```text\n{output_of(block['command'])}```",
        ANSWER.sub(answered, markdown),
    )


def renewed(number: str, changes: list[tuple[str, str]]) -> str:
    """The number that has the place of another in the outputs before it, of which `changes` has the old and the new.

    Where the words around the numbers have changed too, places say nothing: the number stays, for a reader to mend.
    """
    for old, new in reversed(changes):
        before = NUMBER.findall(old)
        if number in before and _words_between(old) == _words_between(new):
            return NUMBER.findall(new)[before.index(number)]
    return number


def _words_between(output: str) -> list[str]:
    """The text between the numbers of an output, without the spaces that align its columns."""
    return ["".join(text.split()) for text in NUMBER.split(output)]


def figure_file(name: str, language: str) -> Path:
    """The picture of a figure on the pages of a language."""
    return PAGES / language / "figures" / f"{name}.svg"


def main() -> None:
    """Write outputs and figures."""
    ideas = sys.argv[1:] or (*IDEAS, *OTHERS, "index")
    for idea in ideas:
        for language in LANGUAGES:
            page = IdeaPage(idea, language)
            page.file.write_text(filled(page.markdown), encoding="utf-8")
        for name in pictures(IdeaPage(idea, LANGUAGES[0]).markdown):
            drawing = FIGURES[name]()
            for language in LANGUAGES:
                figure_file(name, language).write_text(drawing(language), encoding="utf-8")


if __name__ == "__main__":
    main()
