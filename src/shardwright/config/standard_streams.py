"""Standard output and standard error that tolerate a closed pipe, as after `| head`.

When the reader has closed the pipe, Python raises BrokenPipeError at the next write, at any place of a command: a file
that the user asked for would not be written, or a run would end. Here that output is dropped, and the command continues
to its end. Other faults, such as a full disk, are raised as before.
"""

import io
import sys
from typing import Any


class _UnreadFile(io.FileIO):
    """A file descriptor that accepts writes after its reader has closed the pipe."""

    def write(self, data: Any) -> int:
        """Write data; drop it if there is no reader. Returns the number of bytes accepted."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def let_readers_leave() -> None:
    """Replace the standard streams by streams that drop output whose reader has closed the pipe. Streams that were
    replaced already, or closed before this process began, stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        file = io.BufferedWriter(_UnreadFile(stream.fileno(), "wb", closefd=False))
        text = io.TextIOWrapper(
            file,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=name == "stderr",
        )
        setattr(sys, name, text)
