"""Folders of scratch files that go with the process that made them, however it ends.

A folder has a file that its process holds a lock of (flock), which the system gives back when the process has ended.
That is how others tell a folder that is left from one in use: the number of a process says nothing of one on another
host, or in another container, that has the same folder for temporary files.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.train.run_files import open_own

_PREFIX, _LOCK = "shardwright-scratch", ".in-use"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which is removed with all that is in it at the end of the block.

    Where the process is killed, the server of ranks removes it, or else whoever makes the next one here.
    """
    _remove_left("*")
    folder, lock = _new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_folder() -> tuple[Path, int]:
    """A folder and its lock. Another process may have seen it before it was locked, and removed it: then another."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        lock = open_own(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        with suppress(OSError):  # a file system without locks: then nobody else removes it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder / _LOCK):
            return folder, lock
        os.close(lock)


def remove_scratch_of(process: int) -> None:
    """Remove what a process that has ended left behind."""
    _remove_left(str(process))


def _remove_left(process: str) -> None:
    """Remove the folders of this user, made by a process of that number or any, that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{process}-*"):
        if re.fullmatch(rf"{_PREFIX}-\d+-[^-]*", folder.name):
            with suppress(OSError), _held(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock of a folder that is left. OSError where another has it, where it is not there (its process may be about
    to make it), or where the folder is somebody else's."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(str(folder))
    lock = open_own(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
