"""Messages of pydantic about single fields as phrases, recognised by their English text."""

import re

from shardwright.config.phrase import Phrase, either
from shardwright.config.recognised_phrases import recognised

# The messages, with "it" for the "input" of pydantic.
PYDANTIC_MESSAGES = (
    "it should be a valid integer",
    "it should be a valid integer, got a number with a fractional part",
    "it should be a valid number",
    "it should be a finite number",
    "it should be a valid boolean",
    "it should be a valid string",
    "it should be a valid array",
    "it should be an object",
    "it should be greater than {limit}",
    "it should be greater than or equal to {limit}",
    "it should be less than {limit}",
    "it should be less than or equal to {limit}",
    "list should have at least {least} item after validation, not {count}",
    "list should have at least {least} items after validation, not {count}",
    "list should have at most {most} item after validation, not {count}",
    "list should have at most {most} items after validation, not {count}",
    "string should have at least {least} character",
    "string should have at least {least} characters",
    "string should have at most {most} characters",
    "string should match pattern '{pattern}'",
    "it should be {expected}",
)


def message_phrase(message: str) -> str:
    """The phrase of a message of pydantic; a message that is not listed stays as it is."""
    phrase = recognised(message, PYDANTIC_MESSAGES)
    if not isinstance(phrase, Phrase):
        return message
    names = re.findall(r"'[^']*'", phrase.values.get("expected", ""))
    if names and (choices := either(names)) == phrase.values["expected"]:
        return Phrase(phrase.template, {"expected": choices})
    return phrase
