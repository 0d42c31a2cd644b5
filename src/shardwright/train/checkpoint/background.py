"""A write that goes on while the run trains: a thread, how it ended, and when."""

import threading
import time
from collections.abc import Callable


class BackgroundWrite:
    """Runs `write` on a thread of its own."""

    def __init__(self, write: Callable[[], None], name: str) -> None:
        self._write = write
        self._error: Exception | None = None
        self.ended_s = 0.0  # of time.monotonic, once it is over
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error
        self.ended_s = time.monotonic()

    def is_over(self) -> bool:
        """True if it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended, or so long. Returns whether it has."""
        self._thread.join(timeout_s)
        return self.is_over()

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._error
