"""Sentences for people, which can be printed in another language than English.

A phrase is a str in English, so that errors, JSON and files hold it as any other text. It keeps its template and the
values in it; `in_language` fills the template of another language with the same values, where the sentence is printed.
"""

from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
_CATALOGS = Path(__file__).parent / "phrases"


class Phrase(str):
    """A sentence in English, made of a template with named fields. Its values may be phrases themselves."""

    template: str
    values: dict[str, Any]

    def __new__(cls, template: str, values: dict[str, Any]) -> "Phrase":
        message = super().__new__(cls, template.format(**values))
        message.template, message.values = template, values
        return message

    def __reduce__(self) -> tuple[type["Phrase"], tuple[str, dict[str, Any]]]:
        return Phrase, (self.template, self.values)


def say(template: str, /, **values: Any) -> Phrase:
    """The phrase of a template, whose fields are names: say("{num_ranks:,} ranks", num_ranks=8)."""
    return Phrase(template, values)


def in_language(text: str, language: str) -> str:
    """A text in a language: a phrase by the catalog, anything else as it is."""
    if not isinstance(text, Phrase) or language == ENGLISH:
        return text
    values = {
        name: in_language(value, language) if isinstance(value, str) else value for name, value in text.values.items()
    }
    return catalog_of(language).get(text.template, text.template).format(**values)


@cache
def catalog_of(language: str) -> dict[str, str]:
    """The templates of a language by the English ones. KeyError if there is no such language."""
    if language not in LANGUAGES:
        raise KeyError(f"there are no phrases in {language!r}; use {', '.join(LANGUAGES)}")
    return {} if language == ENGLISH else read_catalog((_CATALOGS / f"{language}.po").read_text(encoding="utf-8"))


def read_catalog(text: str) -> dict[str, str]:
    """The pairs of msgid and msgstr of a .po file, whose strings may go on in further lines."""
    pairs: dict[str, str] = {}
    strings = {"msgid": "", "msgstr": ""}
    keyword = ""
    for line in [*text.splitlines(), 'msgid ""']:
        word, _, quoted = line.partition(" ") if not line.startswith('"') else (keyword, "", line)
        if word not in strings or not quoted:
            continue  # a comment, or an empty line
        if word == "msgid" and keyword == "msgstr":
            pairs[strings["msgid"]] = strings["msgstr"]
            strings = {"msgid": "", "msgstr": ""}
        keyword = word
        strings[word] += quoted[1:-1].replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
    pairs.pop("", None)  # the heading of the file
    return pairs


def field_names(template: str) -> set[str]:
    """The names of the fields of a template."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}
