"""Commands whose help is in the language that is asked for. In English it is as click writes it."""

import inspect
import re
import textwrap
from collections.abc import Iterable

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.usage_errors import bad_words
from shardwright.config.phrase import ENGLISH, Phrase, fixed, in_language, say
from shardwright.config.text_columns import num_columns, wrapped


class LocalizedFormatter(click.HelpFormatter):
    """A writer of helps in a language other than English, whose characters may take two columns."""

    def __init__(self, language: str, width: int | None = None, max_width: int | None = None) -> None:
        super().__init__(width=width, max_width=max_width)
        self._language = language

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write how a command is called."""
        super().write_usage(prog, args, self._translation("Usage: ") if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        title = heading if isinstance(heading, Phrase) else fixed(heading)
        text = in_language(say("{title}:", title=title), self._language)
        self.write(f"{'':>{self.current_indent}}{text}\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs, each of which is one phrase."""
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        indent = " " * self.current_indent
        written = (
            textwrap.indent("\n".join(wrapped(self._translation(paragraph), self.width - len(indent))), indent)
            for paragraph in paragraphs
        )
        self.write("\n\n".join(written) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write terms, and beside each its meaning."""
        rows = list(rows)
        column = min(max(num_columns(term) for term, _ in rows), col_max) + col_spacing + self.current_indent
        for term, meaning in rows:
            first = f"{'':>{self.current_indent}}{term}"
            lines = list(wrapped(self._meaning(meaning), max(self.width - column, 10))) or [""]
            if num_columns(first) + col_spacing > column and meaning:
                self.write(f"{first}\n")
                first = ""
            self.write(f"{first:<{column}}{lines[0]}".rstrip() + "\n")
            self.write("".join(f"{'':>{column}}{line}\n" for line in lines[1:]))

    def _translation(self, text: str) -> str:
        return in_language(fixed(text), self._language) if text else ""

    def _meaning(self, text: str) -> str:
        """The meaning of an option, and behind it in brackets its default, its range, and that it is required."""
        if isinstance(text, Phrase):
            return in_language(text, self._language)
        words, *brackets = re.split(r"(?:^|  )\[", text)
        translation = self._translation(words)
        extras = ("; ".join(map(self._extra, bracket[:-1].split("; "))) for bracket in brackets)
        return "  ".join(filter(None, (translation, *(f"[{extra}]" for extra in extras))))

    def _extra(self, text: str) -> str:
        """A default, whose value is translated if it has words; a range; or that an option is required."""
        name, separator, value = text.partition("default: ")
        if name or not separator:
            return self._translation(text) if text == "required" else text
        has_words = " " in value and not value.startswith("(")  # in brackets is a value as it is written
        return in_language(say("default: {value}", value=fixed(value) if has_words else value), self._language)


class LocalizedContext(click.Context):
    """A context that writes helps in the language of its command."""

    def make_formatter(self) -> click.HelpFormatter:
        """The writer of a help. In English that of click."""
        return formatter_in(command_language(self), self.terminal_width, self.max_content_width)


class LocalizedCommand(click.Command):
    """A command whose help is in the language that is asked for."""

    context_class = LocalizedContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments. One error lists all unknown options, and all values that are wrong or missing."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise bad_words(self, ctx, words, error) from None

    def get_short_help_str(self, limit: int = 45) -> str:
        """The beginning of the help in English; else its first paragraph, which is one phrase."""
        if command_language() == ENGLISH or not self.help:
            return super().get_short_help_str(limit)
        return " ".join(inspect.cleandoc(self.help).split("\n\n")[0].split())


class LocalizedGroup(click.Group):
    """A group of such commands."""

    context_class = LocalizedContext
    command_class = LocalizedCommand


def formatter_in(language: str, width: int | None, max_width: int | None = None) -> click.HelpFormatter:
    """The writer of a help in a language, whose lines have a width."""
    if language == ENGLISH:
        return click.HelpFormatter(width=width, max_width=max_width)
    return LocalizedFormatter(language, width, max_width)
