"""The language in which a command tells helps, faults, notes and progress."""

from collections.abc import Sequence
from itertools import pairwise

import click

from shardwright.config.phrase import ENGLISH, LANGUAGES, in_language, language_of_locale

LANGUAGE, _AS_JSON = "shardwright.language", "shardwright.json"


def command_language(ctx: click.Context | None = None) -> str:
    """The language in which a command tells faults, notes and progress: the one that is asked for, or the locale's.
    English beside JSON, which programs read. Without a context, that of the command that runs."""
    ctx = ctx or click.get_current_context(silent=True)
    meta = ctx.find_root().meta if ctx is not None else {}
    return ENGLISH if meta.get(_AS_JSON) else meta.get(LANGUAGE) or language_of_locale()


def tell(text: str, err: bool = False) -> None:
    """Print a line in the language of the command."""
    click.echo(in_language(text, command_language()), err=err)


def asked_language(words: Sequence[str]) -> str:
    """The language that the words of a command line ask for; empty if none does."""
    options = _options_in(words)
    for option, value in pairwise([*options, ""]):
        name, _, joined = option.partition("=")
        if name == "--lang" and (joined or value) in LANGUAGES:
            return joined or value
    return ""


def remember_words(ctx: click.Context, words: Sequence[str]) -> None:
    """Note the language and the kind of output that the words of a command line ask for, before they are understood: a
    help or a usage error ends that."""
    ctx.meta[LANGUAGE], ctx.meta[_AS_JSON] = asked_language(words), is_json_asked(words)


def language_of_words(words: Sequence[str]) -> str:
    """The language of what is told about a command line without a context."""
    return ENGLISH if is_json_asked(words) else asked_language(words) or language_of_locale()


def is_json_asked(words: Sequence[str]) -> bool:
    """True if the words of a command line ask for JSON."""
    return "--json" in _options_in(words)


def _options_in(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def remember_language(ctx: click.Context, option: click.Parameter, language: str | None) -> str:
    """The language that is asked for, or the locale's; faults are told in it, too."""
    meta = ctx.find_root().meta
    meta[LANGUAGE] = language or meta.get(LANGUAGE) or language_of_locale()
    return str(meta[LANGUAGE])


def remember_json(ctx: click.Context, option: click.Parameter, as_json: bool) -> bool:
    """True if the output is JSON, beside which faults are told in English, too."""
    ctx.find_root().meta[_AS_JSON] = as_json
    return as_json
