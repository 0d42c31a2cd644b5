"""Standard streams that tolerate a closed pipe, as after `| head`, and that were closed before the command began.

When the reader has closed the pipe, Python raises BrokenPipeError at the next write, at any place of a command: a file
that the user asked for would not be written, or a run would end. Here that output is dropped, and the command continues
to its end. Other faults, such as a full disk, are raised as before.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any


def fill_closed_streams() -> None:
    """Open the null device in the place of each standard stream that is closed, for this process and its children.

    Else the next file or socket that is opened takes the stream's descriptor, and what a child prints goes there.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # of free descriptors a system gives the lowest
        setattr(sys, name, open(descriptor, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115 (ends with the process)


class _UnreadFile(io.FileIO):
    """A file descriptor that accepts writes after its reader has closed the pipe."""

    def write(self, data: Any) -> int:
        """Write data; drop it if there is no reader. Returns the number of bytes accepted."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def let_readers_leave() -> None:
    """Replace the standard streams by streams that drop output whose reader has closed the pipe, and that write what
    their encoding lacks as escapes. Streams that were replaced already stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        file = io.BufferedWriter(_UnreadFile(stream.fileno(), "wb", closefd=False))
        text = io.TextIOWrapper(
            file,
            encoding=stream.encoding,
            errors="backslashreplace",  # a strict one, as with PYTHONIOENCODING=ascii, would end a run
            line_buffering=stream.line_buffering,
            write_through=name == "stderr",
        )
        setattr(sys, name, text)
