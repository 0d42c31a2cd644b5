"""A report as paragraphs and tables, whose language is chosen when it is printed (config/phrase.py)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shardwright.config.phrase import ENGLISH, in_language
from shardwright.config.text_columns import aligned, filled, num_columns


@dataclass(frozen=True)
class Paragraph:
    """Sentences as lines that fit the page. `first` begins the first line, `hang` the others."""

    sentences: tuple[str, ...]
    first: str = ""
    hang: str = ""

    def text(self, language: str) -> str:
        """The paragraph in a language. Chinese sentences have no space between them."""
        texts = [in_language(sentence, language) for sentence in self.sentences if sentence]
        return filled((" " if language == ENGLISH else "").join(texts), self.first, self.hang)


@dataclass(frozen=True)
class AlignedRows:
    """A table. Columns in `left` are aligned left, others right; `gap` columns lie between two."""

    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    gap: int = 2

    def text(self, language: str) -> str:
        """The table in a language."""
        return aligned([[in_language(cell, language) for cell in row] for row in self.rows], self.gap, self.left)


@dataclass(frozen=True)
class Lines:
    """Parts one below the other, with no empty line between."""

    parts: "Sequence[Part]"

    def text(self, language: str) -> str:
        """The parts in a language."""
        return "\n".join(part_text(part, language) for part in self.parts)


@dataclass(frozen=True)
class Title:
    """A heading, underlined."""

    phrase: str
    number: int

    def text(self, language: str) -> str:
        """The heading in a language."""
        title = f"{self.number}. {in_language(self.phrase, language)}"
        return f"{title}\n{'-' * num_columns(title)}"


Part = Paragraph | AlignedRows | Lines | Title | str  # a str is a line that is not broken


def paragraph(*sentences: str) -> Paragraph:
    """A paragraph of sentences; empty ones are left out."""
    return Paragraph(sentences)


def part_text(part: Part, language: str) -> str:
    """A part of a document in a language."""
    return in_language(part, language) if isinstance(part, str) else part.text(language)


def document_text(parts: Iterable[Part], language: str = ENGLISH) -> str:
    """Parts with an empty line between them, in a language."""
    return "\n\n".join(part_text(part, language) for part in parts)
