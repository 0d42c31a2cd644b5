"""Reports the progress of tokenizing, from time to time."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwright.config.base import printable
from shardwright.config.phrase import Phrase, in_language, language_of_locale, say
from shardwright.config.units import memory_text, seconds_text
from shardwright.train.data.source_files import SourceFile

Tell = Callable[[str], None]
_FIRST_S, _EVERY_S = 5.0, 10.0


@dataclass
class ReadPlace:
    """The position of reading: `done_bytes` of complete files, and the `share` of the current file. `on_change` is
    called whenever the share changes."""

    done_bytes: int = 0
    file_bytes: int = 0
    share: float = 0.0
    on_change: Callable[[], None] = field(default=lambda: None)

    def begin(self, file: SourceFile) -> None:
        """Begin the next file."""
        self.done_bytes += self.file_bytes
        self.file_bytes, self.share = file.size_bytes, 0.0

    def at(self, share: float) -> None:
        """Set the share of the current file that was read."""
        self.share = share
        self.on_change()

    @property
    def read_bytes(self) -> float:
        """The bytes read so far."""
        return self.done_bytes + self.share * self.file_bytes


class Progress:
    """Reports progress to `tell` after some seconds and then from time to time, and each second to `tell_others`."""

    def __init__(self, files: Sequence[SourceFile], data_path: str, tell: Tell, tell_others: Tell) -> None:
        self._num_tokens = 0
        self.place = ReadPlace(on_change=lambda: self.step(self._num_tokens))
        self._total_bytes = max(1, sum(file.size_bytes for file in files))
        self._data_path, self._tell, self._tell_others = data_path, tell, tell_others
        self._begun_s = self._last_tell_others_s = time.monotonic()
        self._last_tell_s = self._begun_s - _EVERY_S + _FIRST_S

    def step(self, num_tokens: int) -> None:
        """Report if it is time; `num_tokens` were written so far."""
        self._num_tokens = num_tokens
        now_s = time.monotonic()
        if now_s - self._last_tell_others_s >= 1.0:
            self._last_tell_others_s = now_s
            self._tell_others(self._in_words(num_tokens, now_s))
        if now_s - self._last_tell_s >= _EVERY_S:
            self._last_tell_s = now_s
            progress = self._in_words(num_tokens, now_s)
            self._tell(say("tokens of {path}: {progress}", path=self._data_path, progress=progress))

    def _in_words(self, num_tokens: int, now_s: float) -> Phrase:
        spent_s = max(now_s - self._begun_s, 1e-9)
        share = min(1.0, self.place.read_bytes / self._total_bytes)
        remaining = seconds_text(max(1.0, spent_s * (1 - share) / share)) if share else say("an unknown time")
        return say(
            "{share:.1%} of {size}, {tokens:,} tokens, {rate:,.0f} a second, about {remaining} left",
            share=share,
            size=memory_text(self._total_bytes),
            tokens=num_tokens,
            rate=num_tokens / spent_s,
            remaining=remaining,
        )


def tell_aside(line: str) -> None:
    """Print a line on standard error, in the language of the locale."""
    print(printable(in_language(line, language_of_locale())), file=sys.stderr, flush=True)
