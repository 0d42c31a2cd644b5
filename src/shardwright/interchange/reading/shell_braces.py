"""Lists in braces, which make several words of one before anything else is expanded: {a,b} and {1..8} (Bash manual,
section 3.5.1)."""

import re
from dataclasses import replace
from itertools import pairwise

from shardwright.interchange.reading.shell_words import Token, WordPiece

_MOST_WORDS, _MOST_LISTS = 500, 50
_UNKNOWN = WordPiece("command", "a_list_in_braces", False)  # which prints nothing that is known
_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([a-zA-Z])\.\.([a-zA-Z])(?:\.\.(-?\d{1,4}))?")


def braced(token: Token) -> list[Token]:
    """The tokens that the lists in braces of a token make; the token itself if it has none, and an unknown one for
    very many words or lists."""
    if not any(piece.kind == "text" and not piece.quoted and "{" in piece.text for piece in token.pieces):
        return [token]
    signs = _signs(token)
    is_short = sum(_is_plain(sign) and sign.text == "{" for sign in signs) <= _MOST_LISTS
    words = _words(signs, _MOST_WORDS) if is_short else None
    if words is None:
        return [replace(token, pieces=(_UNKNOWN,))]
    if words == [signs]:
        return [token]
    before_names = {id(sign) for sign, after in pairwise(signs) if _is_of_name(after)}
    return [replace(token, pieces=_pieces(word, before_names)) for word in words]


def _signs(token: Token) -> list[WordPiece]:
    """A token as pieces of which each unquoted text has one character."""
    return [
        part
        for piece in token.pieces
        for part in (
            [WordPiece("text", char, False) for char in piece.text]
            if piece.kind == "text" and not piece.quoted
            else [piece]
        )
    ]


def _pieces(signs: list[WordPiece], before_names: set[int]) -> tuple[WordPiece, ...]:
    """Pieces in which characters that follow each other are one text. A name before one, as in {$A,x}y, would be
    another, so that it is unknown; variables of `before_names` have had one behind them before."""
    pieces: list[WordPiece] = []
    for sign in signs:
        last = pieces[-1] if pieces else None
        if last is not None and last.kind == "variable" and _is_of_name(sign) and id(last) not in before_names:
            pieces[-1] = _UNKNOWN
        if pieces and _is_plain(sign) and _is_plain(pieces[-1]):
            pieces[-1] = WordPiece("text", pieces[-1].text + sign.text, False)
        else:
            pieces.append(sign)
    return tuple(pieces)


def _is_plain(piece: WordPiece) -> bool:
    return piece.kind == "text" and not piece.quoted


def _is_of_name(piece: WordPiece) -> bool:
    return _is_plain(piece) and (piece.text.isalnum() or piece.text == "_")


def _words(signs: list[WordPiece], most: int) -> list[list[WordPiece]] | None:
    """The words of a word with lists in braces; None if they are more than `most`."""
    for begin, sign in enumerate(signs):
        if not _is_plain(sign) or sign.text != "{":
            continue
        inside = _list_at(signs, begin)
        if inside is None:
            continue
        parts, end = inside
        lasts = _words(signs[end:], most)
        if lasts is None:
            return None
        middles: list[list[WordPiece]] = []
        for part in parts:
            inner = _words(part, most)
            if inner is None or len(middles) + len(inner) > most:
                return None
            middles += inner
        if len(middles) * len(lasts) > most:
            return None
        return [signs[:begin] + middle + last for middle in middles for last in lasts]
    return [signs]


def _list_at(signs: list[WordPiece], begin: int) -> tuple[list[list[WordPiece]], int] | None:
    """The parts of the list whose brace is at a place, and the place behind it; None if it is no list."""
    depth, parts = 0, [list[WordPiece]()]
    for place in range(begin, len(signs)):
        char = signs[place].text if _is_plain(signs[place]) else ""
        depth += (char == "{") - (char == "}")
        if depth == 0:
            words = parts if len(parts) > 1 else _sequence(parts[0])
            return None if words is None else (words, place + 1)
        if char == "," and depth == 1:
            parts.append([])
        elif place > begin:
            parts[-1].append(signs[place])
    return None


def _sequence(signs: list[WordPiece]) -> list[list[WordPiece]] | None:
    """The words of a sequence such as 1..8 or a..e; None if it is none."""
    if not all(map(_is_plain, signs)):
        return None
    text = "".join(sign.text for sign in signs)
    if match := _NUMBERS.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        has_zeros = any(re.match(r"-?0\d", number) for number in (match[1], match[2]))
        width = max(len(match[1]), len(match[2])) if has_zeros else 0
        words = [f"{number:0{width}d}" for number in _numbers(first, last, match[3])]
    elif match := _LETTERS.fullmatch(text):
        if match[1].isupper() != match[2].isupper():
            return None
        words = [chr(code) for code in _numbers(ord(match[1]), ord(match[2]), match[3])]
    else:
        return None
    return [[WordPiece("text", char, False) for char in word] for word in words]


def _numbers(first: int, last: int, step: str | None) -> range:
    """The numbers from one to another, at most some more than are taken."""
    size = abs(int(step or 1)) or 1
    numbers = range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
    return numbers[: _MOST_WORDS + 1]
