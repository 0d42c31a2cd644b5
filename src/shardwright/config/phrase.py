"""Sentences for people, which can be printed in another language than English.

A phrase is a str in English, so that errors, JSON and files hold it as any other text. It keeps its template and the
values in it; `in_language` fills the template of another language with the same values, where the sentence is printed.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from numbers import Number
from pathlib import Path
from string import Formatter
from typing import Any

from shardwright.config.percent import PercentFormatter

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
_SEPARATORS = {ENGLISH: ", ", "zh": "、"}
_SEMICOLONS = {ENGLISH: "; ", "zh": "；"}
_PERIODS = {ENGLISH: ".", "zh": "。"}
# A template has a space beside a value, which may be a name in Latin letters, and needs none beside a Chinese one.
_CHINESE = "[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef]"
_BETWEEN_CHINESE = re.compile(f"(?<={_CHINESE}) (?={_CHINESE})")
_PERCENTS = PercentFormatter()
_STARTED_IN = "SHARDWRIGHT_LANGUAGE"
_CATALOGS = Path(__file__).parent / "phrases"


class Phrase(str):
    """A text in English, made of a template with named fields. Its values may be phrases themselves, or tuples of them,
    which are listed."""

    template: str
    values: dict[str, Any]

    def __new__(cls, template: str, values: dict[str, Any]) -> "Phrase":
        phrase = super().__new__(cls, cls.text(template, values, ENGLISH))
        phrase.template, phrase.values = template, values
        return phrase

    def __reduce__(self) -> tuple[type["Phrase"], tuple[str, dict[str, Any]]]:
        """The parts of the phrase for a pickle, in which values other than numbers are texts, so that none can fail."""
        values = {
            name: value if isinstance(value, str | tuple | Number) else str(value)
            for name, value in self.values.items()
        }
        return type(self), (self.template, values)

    @classmethod
    def text(cls, template: str, values: dict[str, Any], language: str) -> str:
        """The text of a template with its values in a language."""
        if language == ENGLISH:
            return _filled(template, values, language)
        return _BETWEEN_CHINESE.sub("", _filled(template_in(template, language), values, language))


class PhraseBeginning(Phrase):
    """A phrase up to its last semicolon, if it has one: a fault without its way out."""

    @classmethod
    def text(cls, template: str, values: dict[str, Any], language: str) -> str:
        """The beginning of the text of a template with its values in a language."""
        whole = super().text(template, values, language)
        return whole.rpartition(_SEMICOLONS[language])[0] or whole


class PhraseWithoutPeriod(Phrase):
    """A sentence without the period at its end, to stand in brackets."""

    @classmethod
    def text(cls, template: str, values: dict[str, Any], language: str) -> str:
        """The text of a template with its values in a language, up to its period."""
        return super().text(template, values, language).rstrip(_PERIODS[language])


def say(template: str, /, **values: Any) -> Phrase:
    """The phrase of a template, whose fields are names: say("{num_ranks:,} ranks", num_ranks=8)."""
    return Phrase(template, values)


def fixed(text: str) -> Phrase:
    """The phrase of a text without values."""
    return Phrase(text.replace("{", "{{").replace("}", "}}"), {})


def both(texts: Sequence[str]) -> str:
    """Texts with "and" between each two of them: "a", "a and b"."""
    return reduce(lambda first, second: say("{first} and {second}", first=first, second=second), texts)


def either(texts: Sequence[str]) -> str:
    """Texts of which one is to be chosen: "a", "a or b", "a, b or c"."""
    if len(texts) == 1:
        return texts[0]
    return say("{first} or {last}", first=say("{listed}", listed=tuple(texts[:-1])), last=texts[-1])


def each(texts: Sequence[str]) -> str:
    """Texts with semicolons between them: "a; b; c"."""
    return reduce(lambda first, second: say("{note}; {other}", note=first, other=second), texts) if texts else ""


def sentences_of(texts: Sequence[str]) -> str:
    """Sentences one behind the other, with a space between them in English: "A. B."."""
    return reduce(lambda first, second: say("{first} {second}", first=first, second=second), texts) if texts else ""


def spaced(texts: Sequence[str]) -> str:
    """Texts with two spaces between each two of them, as columns of a line: "a  b"."""
    return reduce(lambda first, second: say("{first}  {second}", first=first, second=second), texts) if texts else ""


def below(texts: Sequence[str]) -> str:
    """Texts one below the other."""
    return reduce(lambda first, second: say("{first}\n{second}", first=first, second=second), texts) if texts else ""


def summed(terms: Sequence[str]) -> str:
    """Terms with a plus between them: "a + b + c"."""
    return reduce(lambda first, second: say("{terms} + {term}", terms=first, term=second), terms) if terms else ""


def any_of(texts: Sequence[str]) -> str:
    """Texts with "or" between each two of them: "a or b or c"."""
    return reduce(lambda first, second: say("{first} or {last}", first=first, last=second), texts) if texts else ""


def capitalized(text: str) -> str:
    """A text whose first letter in English is a capital."""
    if not isinstance(text, Phrase):
        return text[:1].upper() + text[1:]
    return Phrase(text.template[:1].upper() + text.template[1:], text.values)


def without_way_out(fault: str) -> str:
    """A fault up to its last semicolon."""
    if not isinstance(fault, Phrase):
        return fault.rpartition(_SEMICOLONS[ENGLISH])[0] or fault
    return PhraseBeginning(fault.template, fault.values)


def without_period(sentence: str) -> str:
    """A sentence without the period at its end."""
    if not isinstance(sentence, Phrase):
        return sentence.rstrip(_PERIODS[ENGLISH])
    return PhraseWithoutPeriod(sentence.template, sentence.values)


def with_changed_texts(text: str, change: Callable[[str], str]) -> str:
    """A text after a change. A phrase stays one if only texts among its values change, and no words of its template."""
    if not isinstance(text, Phrase):
        return change(text)
    changed = type(text)(text.template, {name: _changed(value, change) for name, value in text.values.items()})
    in_english = change(str(text))
    return changed if changed == in_english else in_english


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(item, change) for item in value)
    return with_changed_texts(value, change) if isinstance(value, str) else value


def note_phrase(note: str) -> Phrase:
    """A note as a sentence."""
    return say("Note: {note}.", note=note)


def in_language(text: str, language: str) -> str:
    """A text in a language: a phrase by the catalog, anything else as it is."""
    if not isinstance(text, Phrase) or language == ENGLISH:
        return str(text)
    return text.text(text.template, text.values, language)


def spoken(data: Any, language: str) -> Any:
    """Dictionaries and lists, as of JSON, with their phrases in a language. In English they are as they are, for a
    phrase is an English text, and answers have tens of thousands of numbers."""
    if language == ENGLISH:
        return data
    if isinstance(data, dict):
        return {in_language(key, language): spoken(value, language) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [spoken(item, language) for item in data]
    return in_language(data, language) if isinstance(data, Phrase) else data


def as_data(text: str) -> Any:
    """A text as JSON can hold it, of which `of_data` makes it again: a phrase as its template and its values."""
    if not isinstance(text, Phrase):
        return text
    values = {
        name: [as_data(item) for item in value]
        if isinstance(value, tuple)
        else as_data(value)
        if isinstance(value, str)
        else value
        if isinstance(value, int | float)
        else str(value)
        for name, value in text.values.items()
    }
    return {"template": text.template, "values": values}


def of_data(data: Any) -> str:
    """The text of which `as_data` made data. ValueError for other data, or a template that no catalog has: they may be
    a stranger's."""
    if isinstance(data, str):
        return data
    is_phrase = isinstance(data, dict) and data.keys() == {"template", "values"} and isinstance(data["values"], dict)
    if not is_phrase or not any(data["template"] in catalog_of(language) for language in LANGUAGES):
        raise ValueError("the data are no text")
    values = {
        name: value
        if isinstance(value, int | float)
        else tuple(of_data(item) for item in value)
        if isinstance(value, list)
        else of_data(value)
        for name, value in data["values"].items()
    }
    try:
        return Phrase(data["template"], values)
    except (LookupError, TypeError) as error:
        raise ValueError("the data are no text") from error


def language_of_locale() -> str:
    """The language of the command that started this process, if one did; else of the user's locale if there is text in
    it, else English."""
    if (started_in := os.environ.get(_STARTED_IN, "")) in LANGUAGES:
        return started_in
    locale = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return next((language for language in LANGUAGES if locale.lower().startswith(language)), ENGLISH)


@contextmanager
def started_processes_speak(language: str) -> Iterator[None]:
    """A context in which processes that are started, such as ranks, tell what they do in a language."""
    if language == language_of_locale():
        yield
        return
    before = os.environ.get(_STARTED_IN)
    os.environ[_STARTED_IN] = language
    try:
        yield
    finally:
        del os.environ[_STARTED_IN]
        if before is not None:
            os.environ[_STARTED_IN] = before


def template_in(template: str, language: str) -> str:
    """The template of a language, also of one that was capitalized; the English one where the catalog has none."""
    catalog = catalog_of(language)
    return catalog.get(template) or catalog.get(template[:1].lower() + template[1:]) or template


def _filled(template: str, values: dict[str, Any], language: str) -> str:
    """A template with its values in a language."""
    shown = {name: _value(value, language) for name, value in values.items()}
    return _PERCENTS.format(template, **shown) if "%}" in template else template.format(**shown)


def _value(value: Any, language: str) -> Any:
    if type(value) is tuple:  # an action of a schedule is one, too, and has words of its own
        return _SEPARATORS[language].join(in_language(item, language) for item in value)
    return in_language(value, language) if isinstance(value, str) else value


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
