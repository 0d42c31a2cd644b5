"""Standard output and standard error whose readers may leave, as `head` does.

Python raises BrokenPipeError at the next write then, wherever the command is: a file that the user asked for would not
be written, and a run would end. Here what nobody reads is dropped, and the command goes on to its end. A disk that is
full, or another fault, is raised as before.
"""

import io
import sys
from typing import Any


class _UnreadFile(io.FileIO):
    """A file descriptor that takes what is written also when its reader has left."""

    def write(self, data: Any) -> int:
        """The number of bytes that were taken."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def let_readers_leave() -> None:
    """From now on, what is written to standard streams whose readers have left is dropped. Streams that somebody has
    replaced, or that were closed before this process began, stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        file = io.BufferedWriter(_UnreadFile(stream.fileno(), "wb", closefd=False))
        text = io.TextIOWrapper(
            file, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
            write_through=name == "stderr",
        )  # fmt: skip
        setattr(sys, name, text)
