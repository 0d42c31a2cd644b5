"""A write in a background thread while the run trains, with its error and its end time."""

import threading
import time
from collections.abc import Callable


class BackgroundWrite:
    """Runs `write` on a thread of its own."""

    def __init__(self, write: Callable[[], None], name: str) -> None:
        self._write = write
        self._error: Exception | None = None
        self.ended_s = 0.0  # time.monotonic() at the end of the write
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error
        self.ended_s = time.monotonic()

    def is_over(self) -> bool:
        """True if the write has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the write has ended, or for `timeout_s`. Returns True if it has ended."""
        self._thread.join(timeout_s)
        return self.is_over()

    @property
    def error(self) -> Exception | None:
        """The exception of a failed write, None if it has not failed."""
        return self._error
