"""Messages of pydantic about single fields as phrases, recognised by their English text."""

import re

from shardwright.config.phrase import Phrase, either

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
    for template in PYDANTIC_MESSAGES:
        if (values := _values_in(message, template)) is not None:
            return Phrase(template, values)
    return message


def _values_in(message: str, template: str) -> dict[str, str] | None:
    """The values with which a template makes a message; None if it does not. Values are single words, but a list of
    expected ones."""
    pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\S+)", re.escape(template)).replace(
        "(?P<expected>\\S+)", "(?P<expected>.+)"
    )
    match = re.fullmatch(pattern, message)
    if match is None:
        return None
    values: dict[str, str] = match.groupdict()
    names = re.findall(r"'[^']*'", values.get("expected", ""))
    if names and (choices := either(names)) == values["expected"]:
        values["expected"] = choices
    return values
