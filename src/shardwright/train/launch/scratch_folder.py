"""Folders of scratch files that go with the process that made them, however it ends."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "shardwright-scratch"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which is removed with all that is in it at the end of the block.

    Where the process is killed, the server of ranks removes it, or else whoever makes the next one here.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-.*", folder.name)
        if owner and not _is_alive(int(owner[1])):
            shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_scratch_of(process: int) -> None:
    """Remove what a process that has ended left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{process}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    with suppress(PermissionError):  # somebody else's, alive
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True
