"""Whole numbers in untrusted texts: ASCII digits only, and at most 18 of them, so that they fit 64 bits."""

_MOST_DIGITS = 18


def whole(text: str) -> int | None:
    """The number of a text of digits; None for any other text, such as "²", which Python counts as a digit, too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def signed(text: str) -> int | None:
    """The number of a text of digits, with or without a minus before them; None for any other text."""
    number = whole(text[1:] if text.startswith("-") else text)
    return None if number is None else -number if text.startswith("-") else number
