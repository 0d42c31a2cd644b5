"""The base class of all descriptions: frozen, no unknown fields, no silent conversion of types. And the errors."""

import re
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwright.config.phrase import ENGLISH, Phrase, in_language, say


class Spec(BaseModel):
    """A description. `strict` refuses "4" for 4 and 1.5 for an int; `frozen` forbids changes after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __hash__(self) -> int:
        # Of lists, too: pydantic copies a default that has no hash anew for each description that leaves it out.
        values = _values_of(type(self))(vars(self))
        try:
            return hash(values)
        except TypeError:
            return hash(_hashable(values))


@cache
def _values_of(kind: type[Spec]) -> Callable[[dict[str, Any]], Any]:
    """A function that takes the values of fields from the variables of a description, quickly: searches hash many."""
    return itemgetter(*kind.model_fields) if kind.model_fields else lambda variables: ()


def _hashable(value: Any) -> Hashable:
    """A value, or one with the hash that equal values have: a list in a description changes no more than a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, dict) else value


class SectionSpec(Spec):
    """A section of a job."""

    def faults(self) -> list[str]:
        """Faults of the section by itself, each with its arithmetic and a way out. Each field is valid by itself."""
        return []


class PlanError(ValueError):
    """All faults of the user's input at once. Each fault is one sentence with its arithmetic and a way out. `way_out`
    is a way out that all faults share."""

    def __init__(self, subject: str, faults: Sequence[str], way_out: str = "") -> None:
        assert faults, "an error needs a fault"
        self.subject, self.way_out = hidden(subject), way_out
        self.faults = list(dict.fromkeys(map(hidden, faults)))  # a fault that many cases share is shown once
        super().__init__(self.in_language(ENGLISH))

    def in_language(self, language: str) -> str:
        """The message in a language, as far as its faults are phrases."""
        faults, subject = self.faults, _shown(in_language(self.subject, language), _MOST_SUBJECT)
        heading = say("{subject}: {count} faults", subject=subject, count=len(faults))
        if len(faults) == 1:
            heading = say("{subject}: 1 fault", subject=subject)
        lines = [in_language(heading, language)]
        texts = [_shown(in_language(fault, language), _MOST_TEXT) for fault in faults[:_MOST_FAULTS]]
        lines += [f"  {i}. {text}" for i, text in enumerate(texts, 1)]
        if len(faults) > _MOST_FAULTS:
            more = say("... and {count} more; correct these first", count=len(faults) - _MOST_FAULTS)
            lines.append(f"  {in_language(more, language)}")
        lines += [f"  {_shown(in_language(self.way_out, language), _MOST_TEXT)}"] if self.way_out else []
        return "\n".join(lines)


def together(subject: str, *parts: Callable[[], Any]) -> list[Any]:
    """The values of all parts. Raises one PlanError with the faults of every part, if any has some."""
    values, errors = [], []
    for part in parts:
        try:
            values.append(part())
        except PlanError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0] from None
    if errors:
        ways_out = [error.way_out for error in errors if error.way_out]
        raise PlanError(subject, [fault for error in errors for fault in error.faults], *ways_out[:1]) from None
    return values


def faults_in(error: ValueError) -> list[str]:
    """The list of the faults in an error."""
    return error.faults if isinstance(error, PlanError) else [error_text(error)]


def error_text(error: BaseException) -> str:
    """The message of an error, which stays a phrase if it was raised with one. A KeyError has no quotation marks."""
    message = error.args[0] if len(error.args) == 1 else None
    if isinstance(message, Phrase) or (isinstance(message, str) and isinstance(error, KeyError)):
        return message
    return str(error)


# Limits of a message. A longer text is shown by its beginning and its end, because the way out is at the end.
_MOST_FAULTS, _MOST_SUBJECT, _MOST_TEXT = 20, 500, 2000


def _shown(text: str, most: int) -> str:
    """A part of a message, printable and at most about `most` characters long."""
    return printable(text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}")


_NAMED = r"[?&;#](?:sig|[\w-]{0,50}(?:password|passwd|secret|token|credential|signature|delegation)[\w-]{0,50})="
# A password ends before the last @ before the next /. It may have a space or a quote, unless a port number ends there.
_PLAIN = r"(?!\d+/)(?:[^@\s'\"]|@(?=[^/@\s'\"]{0,200}@)){1,200}(?=@)"
_SPACED = r"(?!\d+(?:[\s'\",;.)\]]|$))[^/\n]{1,200}(?=@)"
_SECRETS = re.compile(rf"(://[^/\s:\['\"]{{0,200}}:)(?:{_PLAIN}|{_SPACED})|({_NAMED})[^&\s'\"]+", re.IGNORECASE)


def hidden(text: str) -> str:
    """The text with passwords of addresses replaced by ***. A phrase without any stays one."""
    if "://" not in text:
        return text
    without = _SECRETS.sub(lambda match: f"{match[1] or match[2]}***", text)
    return text if without == text else without


# A line break, a tab, and the characters that join or separate letters of some scripts.
_HARMLESS = "\n\t\u200c\u200d"


def printable(text: str) -> str:
    """The text with control characters escaped, so that a terminal only prints it."""
    return "".join(c if c.isprintable() or c in _HARMLESS else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a text that a message quotes."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shortened_path(path: str, most: int = 60) -> str:
    """The end of a path that a message quotes, which has the name of the file."""
    return path if len(path) <= most else "..." + path[3 - most :]


class RunError(RuntimeError):
    """A failure of a run with a reason that one sentence tells the user. Wrong input is a PlanError instead."""

    def in_language(self, language: str) -> str:
        """The message of a command that failed, in a language as far as the reason is a phrase."""
        return printable(in_language(say("failed: {reason}", reason=error_text(self)), language))


class PassingError(RunError):
    """A failure of a run that may succeed if it resumes from its last checkpoint."""


def field_text(value: object) -> str:
    """The text of a field's value in a message; "set" for a section."""
    return "set" if isinstance(value, Spec) else repr(value)
