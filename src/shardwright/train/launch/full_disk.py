"""The message about a full disk: the file that could not be written, and the free room."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.config.base import RunError
from shardwright.config.phrase import fixed, say
from shardwright.config.units import MIB

_OTHER_FOLDER = say("name another run.folder")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(RunError):
    """A file could not be written, because there is no room."""


@contextmanager
def telling_of_full_disk(path: Path, way_out: str = _OTHER_FOLDER) -> Iterator[None]:
    """For a block that writes `path`, or files in it: raises DiskFullError if there is no room. Other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFullError(
            say(
                "{path} can't be written: {reason}; make room there or {way_out}",
                path=path,
                reason=_with_free_room(fixed(os.strerror(error.errno or 0)), path),
                way_out=way_out,
            )
        ) from None


def is_full(error: BaseException | None) -> bool:
    """True if an error means that there is no room: on the disk, in the user's quota, or within a file's size limit."""
    return isinstance(error, OSError) and error.errno in _FULL


def quiet_writers() -> None:
    """Print no traceback for a full disk in a thread that writes files: its owner gets the error at the next write."""
    previous_hook = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if not is_full(args.exc_value):
            previous_hook(args)

    threading.excepthook = report


def _with_free_room(reason: str, path: Path) -> str:
    """The reason, and the free room in the folder of a file, or of a link's target, if it is known."""
    try:
        folder = next(parent for parent in path.resolve().parents if parent.is_dir())
        usage = shutil.disk_usage(folder)
    except (OSError, StopIteration):
        return reason
    return say(
        "{reason} ({free:,.1f} MiB of {total:,.1f} MiB are free in {folder})",
        reason=reason,
        free=usage.free / MIB,
        total=usage.total / MIB,
        folder=folder,
    )
