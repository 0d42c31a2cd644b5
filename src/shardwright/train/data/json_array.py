"""Reads the items of a JSON array one by one, from text that comes in pieces, with about one item in memory."""

import json
import re
from collections.abc import Iterator

from shardwright.config.base import error_text
from shardwright.config.phrase import say

_ENDS = set(", \t\n\r]")
_NOT_BLANK = re.compile(r"[^ \t\n\r]")


class BrokenArrayError(ValueError):
    """The text is no valid JSON array; the message tells the fault."""


def array_items(pieces: Iterator[str], longest: int) -> Iterator[object]:
    """The items of a JSON array, each of at most `longest` characters. Raises BrokenArrayError at the first invalid
    item, since the begin of the next one is unknown then."""
    text = _Text(pieces, longest)
    text.expect("[", _BEGINS)
    if text.next_character() == "]":
        text.expect("]", "")
    else:
        while True:
            yield text.item()
            if text.next_character() == "]":
                text.expect("]", "")
                break
            text.expect(",", _GOES_ON)
    if text.next_character():
        raise BrokenArrayError(say("more text is behind the array"))


_BEGINS, _GOES_ON = say("an array begins with ["), say("a comma or ] is wanted behind it")


class _Text:
    """A window of the text, and the position within it. More text is read when it is needed."""

    def __init__(self, pieces: Iterator[str], longest: int) -> None:
        self._pieces, self._longest = pieces, longest
        self._text, self._position = "", 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """The next character that is not blank, without consuming it; "" at the end."""
        num_blank = 0
        while (match := _NOT_BLANK.search(self._text, self._position)) is None:
            num_blank += len(self._text) - self._position
            self._position = len(self._text)
            if num_blank > self._longest:
                raise BrokenArrayError(
                    say("more than {longest:,} characters in a row are blank", longest=self._longest)
                )
            if not self._more(1):
                return ""
        self._position = match.start()
        return match[0]

    def expect(self, character: str, rule: str) -> None:
        """Consume `character`. Raises BrokenArrayError with the broken rule if the next character is another."""
        actual = self.next_character()
        if actual != character:
            raise BrokenArrayError(
                say("{rule}, and {actual} is there", rule=rule, actual=repr(actual) if actual else say("the end"))
            )
        self._position += 1

    def item(self) -> object:
        """The next value. If it can't be read it may be incomplete: then twice as much text is tried."""
        self.next_character()
        while True:
            reason = ""
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                reason = say(
                    "{reason} at character {position} of it", reason=error.msg, position=error.pos - self._position
                )
            except (ValueError, RecursionError) as error:
                raise BrokenArrayError(error_text(error)) from None
            # A number may continue, unless a character of _ENDS follows.
            is_whole = not reason and (isinstance(value, dict | list | str) or self._text[end : end + 1] in _ENDS)
            if is_whole:
                self._position = end
                return value
            size, begin = len(self._text) - self._position, self._position
            if size > self._longest:
                raise BrokenArrayError(
                    say("it is longer than {longest:,} characters, or {reason}", longest=self._longest, reason=reason)
                )
            if not self._more(size):
                if reason:
                    raise BrokenArrayError(reason)
                self._position = end - begin  # _more has dropped the text before the value
                return value

    def _more(self, num_characters: int) -> bool:
        """Read at least `num_characters` more, if there are so many, and drop the text before the position. False at
        the end of the text."""
        parts, num_read = [self._text[self._position :]], 0
        while num_read < num_characters and (piece := next(self._pieces, "")):
            parts.append(piece)
            num_read += len(piece)
        self._text, self._position = "".join(parts), 0
        return num_read > 0
