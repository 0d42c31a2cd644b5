"""Whole numbers in the texts of strangers: of ASCII digits, and so few that they stay within 64 bits."""

_MOST_DIGITS = 18


def whole(text: str) -> int | None:
    """The number that digits say; None for any other text, such as "²", which Python counts as digits too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def signed(text: str) -> int | None:
    """The number that digits behind at most one minus say, or None."""
    number = whole(text[1:] if text.startswith("-") else text)
    return None if number is None else -number if text.startswith("-") else number
