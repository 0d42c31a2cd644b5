"""A lock in a shared folder: one process makes the cached files, and others wait and tell the user for which process.

The lock is a locked file in the folder, which the system releases however its holder ends. Its text names the holder
and its progress. If that text does not change for long, the holder may be stopped, and others stop waiting: files
appear only when complete, so making them twice costs time alone. A file system without locks is used without waiting.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.config.phrase import say
from shardwright.train.run_files import open_own

# How long others wait while the holder's text does not change.
_SILENT_S = 120.0
_TELL_EVERY_S = 30.0
_FIRST_WORD_S = 5.0  # time for a new holder to write its text
Tell = Callable[[str], None]


@contextmanager
def alone(path: Path, is_made: Callable[[], bool], tell: Tell) -> Iterator[Tell | None]:
    """Hold the lock `path` during the block. Yields a function that tells others the progress, or None if the files
    were made meanwhile, which `is_made` finds out. Messages to the user go to `tell`."""
    descriptor = _wait(path, is_made, tell)
    if is_made():
        _release(path, descriptor)
        yield None
        return
    process = f"process {os.getpid()} on {socket.gethostname()}"

    def tell_others(progress: str) -> None:
        if descriptor is not None:
            with suppress(OSError):
                os.pwrite(descriptor, raw := f"{process} ({progress})\n".encode(), 0)
                os.ftruncate(descriptor, len(raw))

    tell_others("beginning")
    try:
        yield tell_others
    finally:
        _release(path, descriptor)


def _wait(path: Path, is_made: Callable[[], bool], tell: Tell) -> int | None:
    """Wait for the lock, and return its file descriptor; or None without it, if the files are made, if the holder says
    nothing for too long, or if the file system has no locks."""
    changed_s, last_tell_s, holder = 0.0, -_TELL_EVERY_S, ""
    begun_s = time.monotonic()
    while True:
        try:
            return _acquire(path)
        except BlockingIOError:
            if is_made():
                return None
        except OSError:  # a file system without locks
            return None
        text, now_s = _read(path), time.monotonic() - begun_s
        if text != holder:
            holder, changed_s = text, now_s
        if now_s - changed_s > _SILENT_S:
            maker = holder or say("who makes these tokens")
            tell(say("{maker} has said nothing for {seconds:.0f} s: made here, too", maker=maker, seconds=_SILENT_S))
            return None
        if now_s - last_tell_s >= _TELL_EVERY_S and (holder or now_s > _FIRST_WORD_S):
            last_tell_s = now_s
            maker = holder or say("another process")
            tell(say("waiting for {maker}, which makes the same tokens", maker=maker))
        time.sleep(min(1.0, 0.05 + now_s / 10))


def _acquire(path: Path) -> int:
    """Take the lock. Returns its file descriptor. Raises BlockingIOError if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file before it was locked here.
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(path: Path, descriptor: int | None) -> None:
    if descriptor is None:
        return
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _read(path: Path) -> str:
    with suppress(OSError), open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read(500).decode(errors="replace").strip()
    return ""
