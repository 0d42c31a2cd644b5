"""How far the making of tokens is, in words, now and then."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.config.base import printable
from shardwright.config.units import memory_text, seconds_text
from shardwright.train.data.source_files import SourceFile

Say = Callable[[str], None]
_FIRST_S, _EVERY_S = 5.0, 10.0


@dataclass
class ReadPlace:
    """Where the reading of files is: so many bytes of files are behind it, and this share of the one that is read."""

    done_bytes: int = 0
    file_bytes: int = 0
    share: float = 0.0
    moved: Callable[[], None] = field(default=lambda: None)  # told whenever it is another

    def begin(self, file: SourceFile) -> None:
        """Go on to a file."""
        self.done_bytes += self.file_bytes
        self.file_bytes, self.share = file.size_bytes, 0.0

    def at(self, share: float) -> None:
        """Go on to where this share of the file is behind it."""
        self.share = share
        self.moved()

    @property
    def read_bytes(self) -> float:
        """Bytes of files that were read."""
        return self.done_bytes + self.share * self.file_bytes


class Progress:
    """Says how far it is: after some seconds, and then now and then; more often to `tell`."""

    def __init__(self, files: Sequence[SourceFile], what: str, say: Say, tell: Say) -> None:
        self._num_tokens = 0
        self.place = ReadPlace(moved=lambda: self.step(self._num_tokens))
        self._total_bytes = max(1, sum(file.size_bytes for file in files))
        self._what, self._say, self._tell = what, say, tell
        self._begun_s = self._told_s = time.monotonic()
        self._said_s = self._begun_s - _EVERY_S + _FIRST_S

    def step(self, num_tokens: int) -> None:
        """So many tokens are written."""
        self._num_tokens = num_tokens
        now_s = time.monotonic()
        if now_s - self._told_s >= 1.0:
            self._told_s = now_s
            self._tell(self._in_words(num_tokens, now_s))
        if now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            self._say(f"tokens of {self._what}: {self._in_words(num_tokens, now_s)}")

    def _in_words(self, num_tokens: int, now_s: float) -> str:
        spent_s = max(now_s - self._begun_s, 1e-9)
        share = min(1.0, self.place.read_bytes / self._total_bytes)
        left = seconds_text(spent_s * (1 - share) / share) if share else "an unknown time"
        return (
            f"{share:.1%} of {memory_text(self._total_bytes)}, {num_tokens:,} tokens, {num_tokens / spent_s:,.0f} a "
            f"second, about {left} left"
        )


def say_aside(line: str) -> None:
    """Tell who watches, on standard error."""
    print(printable(line), file=sys.stderr, flush=True)
