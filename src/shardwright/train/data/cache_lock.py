"""One process at a time makes what many want, in a folder that they share; the others wait, and say for whom.

The lock is a file of the folder that the system gives back however its holder ends. It says who that is and how far.
One that has said nothing new for long may be stopped, and is not waited for any longer: what is made appears whole, so
that making it twice costs time alone. So it is where a file system knows no locks.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.train.run_files import open_own

# Without a word of the holder.
_SILENT_S = 120.0
_TELL_EVERY_S = 30.0
_FIRST_WORD_S = 5.0  # in which who has just taken the lock writes who it is
Say = Callable[[str], None]


@contextmanager
def alone(path: Path, is_made: Callable[[], bool], say: Say) -> Iterator[Say | None]:
    """Hold the lock `path`, and give what tells others how far it is; None where what is wanted was made meanwhile."""
    descriptor = None
    waited_s, told_s, heard = 0.0, -_TELL_EVERY_S, ""
    begun_s = time.monotonic()
    while descriptor is None:
        try:
            descriptor = _taken(path)
        except BlockingIOError:
            if is_made():
                yield None
                return
            said, now_s = _read(path), time.monotonic() - begun_s
            if said != heard:
                heard, waited_s = said, now_s
            if now_s - waited_s > _SILENT_S:
                say(f"{heard or 'who makes these tokens'} has said nothing for {_SILENT_S:.0f} s: made here, too")
                break
            if now_s - told_s >= _TELL_EVERY_S and (heard or now_s > _FIRST_WORD_S):
                told_s = now_s
                say(f"waiting for {heard or 'another process'}, which makes the same tokens")
            time.sleep(min(1.0, 0.05 + now_s / 10))
        except OSError:  # a file system without locks
            break
    if is_made():
        _release(path, descriptor)
        yield None
        return
    who = f"process {os.getpid()} on {socket.gethostname()}"

    def tell(how_far: str) -> None:
        if descriptor is not None:
            with suppress(OSError):
                os.pwrite(descriptor, text := f"{who} ({how_far})\n".encode(), 0)
                os.ftruncate(descriptor, len(text))

    tell("beginning")
    try:
        yield tell
    finally:
        _release(path, descriptor)


def _taken(path: Path) -> int:
    """The lock's descriptor. BlockingIOError where another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had it may have removed it before it was locked here.
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
