"""The message about a full disk: the file that could not be written, and the room that there is."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.config.base import RunError
from shardwright.config.units import MIB

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(RunError):
    """A file could not be written for want of room."""


@contextmanager
def telling_of_full_disk(path: Path, way_out: str = "name another run.folder") -> Iterator[None]:
    """Write `path`, or files in it. DiskFullError where that fails for want of room; other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFullError(
            f"{path} can't be written: {os.strerror(error.errno or 0)}{_free(path)}; make room there or {way_out}"
        ) from None


def is_full(error: BaseException | None) -> bool:
    """True if an error says that there is no room: on the disk, in the user's quota, or below the limit of a file."""
    return isinstance(error, OSError) and error.errno in _FULL


def quiet_writers() -> None:
    """Let no thread that writes files report a full disk with a traceback: its owner hears of it at the next write."""
    before = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if not is_full(args.exc_value):
            before(args)

    threading.excepthook = report


def _free(path: Path) -> str:
    """How much room there is where the file, or what a link of that name leads to, would be."""
    try:
        folder = next(parent for parent in path.resolve().parents if parent.is_dir())
        usage = shutil.disk_usage(folder)
    except (OSError, StopIteration):
        return ""
    return f" ({usage.free / MIB:,.1f} MiB of {usage.total / MIB:,.0f} MiB are free in {folder})"
