"""Phrases of English texts that libraries write, recognised by the templates that make them."""

import re
from collections.abc import Sequence
from typing import Any

from shardwright.config.phrase import Phrase

_OF_MANY_WORDS = "listed|text|reason|expected"  # fields whose values may have spaces; others are single words


def recognised(text: str, templates: Sequence[str]) -> str:
    """The phrase of a text by the first template that makes it; a text of none stays as it is. A value `listed` is a
    tuple of what commas separate."""
    for template in templates:
        match = re.fullmatch(_pattern(template), text, re.DOTALL)
        if match is not None:
            values: dict[str, Any] = match.groupdict()
            if "listed" in values:
                values["listed"] = tuple(values["listed"].split(", "))
            return Phrase(template, values)
    return text


def _pattern(template: str) -> str:
    """The regular expression of the texts that a template makes."""
    pattern = re.sub(rf"\\{{({_OF_MANY_WORDS})\\}}", r"(?P<\1>.+?)", re.escape(template))
    return re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\S+)", pattern)
