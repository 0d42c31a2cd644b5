"""The items of a JSON array, one after the other: the text comes in pieces, and no more than an item is in memory."""

import json
import re
from collections.abc import Iterator

_ENDS = set(", \t\n\r]")
_NOT_BLANK = re.compile(r"[^ \t\n\r]")


class BrokenArrayError(ValueError):
    """A fault of a JSON array, in words."""


def array_items(pieces: Iterator[str], longest: int) -> Iterator[object]:
    """The items of the array that a text is, each of at most so many characters. Raises BrokenArrayError at the first
    that is none: nobody can say where the next one begins."""
    text = _Text(pieces, longest)
    text.expect("[", "an array begins with [")
    if text.next_character() == "]":
        text.expect("]", "")
    else:
        while True:
            yield text.item()
            if text.next_character() == "]":
                text.expect("]", "")
                break
            text.expect(",", "a comma or ] is wanted behind it")
    if text.next_character():
        raise BrokenArrayError("more text is behind the array")


class _Text:
    """The part of a text that is looked at."""

    def __init__(self, pieces: Iterator[str], longest: int) -> None:
        self._pieces, self._longest = pieces, longest
        self._text, self._at = "", 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """The next that is not blank, which stays; nothing at the end."""
        num_blank = 0
        while (found := _NOT_BLANK.search(self._text, self._at)) is None:
            num_blank += len(self._text) - self._at
            self._at = len(self._text)
            if num_blank > self._longest:
                raise BrokenArrayError(f"more than {self._longest:,} characters in a row are blank")
            if not self._more(1):
                return ""
        self._at = found.start()
        return found[0]

    def expect(self, character: str, wanted: str) -> None:
        """Go on behind this character."""
        found = self.next_character()
        if found != character:
            raise BrokenArrayError(f"{wanted}, and {repr(found) if found else 'the end'} is there")
        self._at += 1

    def item(self) -> object:
        """The next value. What can't be read may only have been cut off: then it is tried again with twice as much."""
        self.next_character()
        while True:
            reason = ""
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at character {error.pos - self._at} of it"
            except (ValueError, RecursionError) as error:
                raise BrokenArrayError(str(error)) from None
            # A number that does not end with one of these may go on.
            is_whole = not reason and (isinstance(value, dict | list | str) or self._text[end : end + 1] in _ENDS)
            if is_whole:
                self._at = end
                return value
            size, begin = len(self._text) - self._at, self._at
            if size > self._longest:
                raise BrokenArrayError(f"it is longer than {self._longest:,} characters, or {reason}")
            if not self._more(size):
                if reason:
                    raise BrokenArrayError(reason)
                self._at = end - begin  # what is in front of it is forgotten
                return value

    def _more(self, num_characters: int) -> bool:
        """Have at least so many more; False at the end of the text."""
        parts, num_read = [self._text[self._at :]], 0
        while num_read < num_characters and (piece := next(self._pieces, "")):
            parts.append(piece)
            num_read += len(piece)
        self._text, self._at = "".join(parts), 0
        return num_read > 0
