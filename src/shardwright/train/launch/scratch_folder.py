"""Folders of scratch files that are removed after the end of the process that made them, however it ends.

Each folder has a file that its process locks (flock); the system releases the lock when the process ends. So other
processes can tell an abandoned folder from one in use. A process id does not tell it: hosts and containers may share
the folder for temporary files.
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
    """A new folder, which is removed with its contents at the end of the block.

    If the process is killed, the server of ranks removes the folder, or else the next process that calls this.
    """
    _remove_abandoned("*")
    folder, lock = _new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_folder() -> tuple[Path, int]:
    """Make a folder and lock it. Another process may remove it before it is locked: then a new one is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        lock = open_own(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        with suppress(OSError):  # on a file system without locks no other process removes it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder / _LOCK):
            return folder, lock
        os.close(lock)


def remove_scratch_of(process: int) -> None:
    """Remove the scratch folders of a process that has ended, by its process id."""
    _remove_abandoned(str(process))


def _remove_abandoned(process: str) -> None:
    """Remove this user's folders that no process has locked. `process` is the id of the process that made them, or
    "*" for any."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{process}-*"):
        if re.fullmatch(rf"{_PREFIX}-\d+-[^-]*", folder.name):
            with suppress(OSError), _locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock an abandoned folder during the block. Raises OSError if another process has the lock, if there is no lock
    file (its process may be about to make it), or if the folder is another user's."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(str(folder))
    lock = open_own(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
