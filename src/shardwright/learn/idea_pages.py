"""The pages, as Markdown files of the package and as text for a terminal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.phrase import say
from shardwright.config.text_columns import aligned, num_columns, terminal_width, wrapped

PAGES = Path(__file__).parent / "pages"
LANGUAGES = ("en", "zh")
# In the order in which they build on each other.
IDEAS = (
    "memory-wall",
    "device-memory",
    "collectives",
    "alpha-beta",
    "networks",
    "data-parallel",
    "batch-size",
    "zero",
    "offload",
    "tensor-parallel",
    "context-parallel",
    "pipelines",
    "experts",
    "recomputation",
    "mixed-precision",
    "compression",
    "mesh",
    "placements",
    "choosing",
    "failures",
    "monitoring",
    "systems",
    "contradictions",
    "troubleshooting",
)
TERMS = "terms"  # a table of words, in both languages
QUESTIONS = "questions"  # their answers are computed; each language asks its own
SYSTEMS = ("megatron-lm", "deepspeed", "fsdp", "alpa", "torchtitan", "nanotron", "colossal-ai")
FIRST = "first-questions"  # of a reader who is new, with short answers
OTHERS = (FIRST, *SYSTEMS, "cases", "told-story", "playbook", QUESTIONS, TERMS)  # pages that are not on one idea
_WIDTH = 100  # columns of a paragraph, at most


@dataclass(frozen=True)
class IdeaPage:
    """One page in one language."""

    name: str
    language: str

    @property
    def file(self) -> Path:
        """The Markdown file."""
        return PAGES / self.language / f"{self.name}.md"

    @property
    def markdown(self) -> str:
        """The text of the file."""
        return self.file.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """The heading of the page."""
        return self.markdown.partition("\n")[0].removeprefix("# ")

    @property
    def text(self) -> str:
        """The page for a terminal: headings are underlined, blocks of code are indented, pictures are left out."""
        return terminal_text(self.markdown)


def language_of(address: str) -> str:
    """The language of an address of the site: its first folder, or the first language."""
    first, slash, _ = address.partition("/")
    return first if slash and first in LANGUAGES else LANGUAGES[0]


def page_of(idea: str, language: str) -> IdeaPage:
    """The page of an idea. PlanError with the nearest names if there is none."""
    idea = idea.lower()
    if idea in (*IDEAS, *OTHERS):
        return IdeaPage(idea, language)
    nearest = get_close_matches(idea, (*IDEAS, *OTHERS), 3) or (*IDEAS, *OTHERS)
    raise PlanError(
        "learn", [say("there is no page on {idea}; use {nearest}", idea=repr(idea), nearest=tuple(nearest))]
    )


def contents(language: str) -> str:
    """All ideas with the titles of their pages."""
    width = max(map(len, (*IDEAS, *OTHERS)))
    return "\n".join(f"{name.ljust(width)}  {IdeaPage(name, language).title}" for name in (*IDEAS, *OTHERS))


def terminal_text(markdown: str) -> str:
    """Markdown for a terminal, as `IdeaPage.text` is."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_lines(markdown))).strip()


def _lines(markdown: str) -> Iterator[str]:
    """The lines of a page for a terminal."""
    for number, part in enumerate(re.split(r"^```(\w*)\n(.*?)^```$", markdown, flags=re.MULTILINE | re.DOTALL)):
        if number % 3 == 0:
            for paragraph in re.split(r"\n\n+", part.strip()):
                yield from _paragraph(paragraph)
                yield ""
        elif number % 3 == 2:
            yield from (f"    {line}".rstrip() for line in part.rstrip("\n").split("\n"))
            yield ""


def _paragraph(paragraph: str) -> Iterator[str]:
    plain = re.sub(r"<!--.*?-->\n?|!\[[^\]]*\]\([^)]*\)\n?", "", paragraph, flags=re.DOTALL)
    plain = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", lambda link: _linked(link[1], link[2].removesuffix(".md")), plain)
    plain = plain.replace("：** ", "：").replace("**", "").replace("`", "").strip()
    if plain.startswith("|"):
        yield from _table([[cell.strip() for cell in line.strip("| ").split("|")] for line in plain.split("\n")])
    elif plain.startswith("#"):
        title = plain.lstrip("# ")
        yield from (title, ("=" if plain.startswith("# ") else "-") * num_columns(title))
    elif plain.startswith(("- ", "1. ")):
        for item in re.split(r"\n(?=- |\d\. )", plain):
            yield from wrapped(joined(item), min(_WIDTH, terminal_width()))
    elif plain:
        yield from wrapped(joined(plain), min(_WIDTH, terminal_width()))


def _linked(text: str, target: str) -> str:
    """The text of a link, and the name by which `learn` reads the page that it leads to."""
    return f"{text} ({target})" if target in (*IDEAS, *OTHERS) and target != text.lower() else text


def joined(paragraph: str) -> str:
    """The lines of a paragraph as one; between two Chinese characters there is no space."""
    return re.sub(r"\s*\n\s*", " ", re.sub(r"(?<=[^\x00-\x7f])\n\s*(?=[^\x00-\x7f])", "", paragraph))


def _table(rows: list[list[str]]) -> Iterator[str]:
    """The rows of a table in columns that fit the terminal, without the line below its heading."""
    yield from aligned([*rows[:1], *rows[2:]], left=range(len(rows[0]))).split("\n")
