"""The one place that opens files named by a user: regular files of a reasonable size, read once, with a limit.

By mistake or malice, the name of a job, a tokenizer or a table may be a device that never ends, a FIFO without a
writer, or a sparse file of terabytes. Nothing here waits or reads without a limit. A FileFault says what the file is
and names a way out; an OSError is the system's.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardwright.config.phrase import fixed, say

# Folders whose files are not on any disk: the kernel and its drivers make them. /dev/shm is memory for ordinary files.
_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")
_OF_THE_KERNEL = say("what the kernel shows of itself")
_FOR_FILES = ("/dev/shm",)
AS_UTF8 = say("save it as UTF-8")

_KINDS = (
    (stat.S_ISDIR, say("a folder")),
    (stat.S_ISFIFO, say("a FIFO")),
    (stat.S_ISSOCK, say("a socket")),
    (stat.S_ISCHR, say("a character device")),
    (stat.S_ISBLK, say("a block device")),
)


class FileFault(ValueError):  # noqa: N818 (a fault in the words of PlanError)
    """A fault of a file, in one sentence with a way out."""


def kind_of(mode: int) -> str:
    """The kind of a file by its mode, in words; empty if it is a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), say("no regular file"))


def path_exists(path: str) -> bool:
    """True if there is a file or folder of that path."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


@contextmanager
def open_file(path: Path, most_bytes: int = 0, what: str = "file") -> Iterator[BinaryIO]:
    """Open a regular file of at most `most_bytes` bytes (0: any size) for reading. `what` is the word for it in faults.
    Raises FileFault or OSError."""
    try:
        kind = kind_of(os.stat(path).st_mode)  # before opening, because opening a device may have effects
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise FileFault(
            say("{path} is no name of a file: {error}; check the path", path=repr(str(path)), error=str(error))
        ) from None
    kind = kind or (_OF_THE_KERNEL if is_of_the_kernel(path) else "")  # some of these wait for ever, or have no end
    if kind:
        raise FileFault(_not_regular(path, kind, what))
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if most_bytes and status.st_size > most_bytes:
            raise FileFault(_too_large(path, say("{size:,} bytes", size=status.st_size), most_bytes))
        yield file


def read_file(path: Path, most_bytes: int, what: str = "file") -> bytes:
    """The contents of a regular file of at most `most_bytes` bytes. Raises FileFault or OSError."""
    with open_file(path, most_bytes, what) as file:
        contents = file.read(most_bytes + 1)
    if len(contents) > most_bytes:  # it grows, or its size is unknown before reading, as under /proc
        raise FileFault(_too_large(path, say("more bytes than it says"), most_bytes))
    return contents


def read_text(path: Path, most_bytes: int, what: str = "file", hint: str = AS_UTF8) -> str:
    """The text of a regular file in UTF-8, with or without a byte order mark. `hint` is the way out if it is no text.
    Raises FileFault or OSError."""
    contents = read_file(path, most_bytes, what)
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFault(
            say("{path} is not UTF-8 text (byte {start}); {hint}", path=str(path), start=error.start, hint=hint)
        ) from None


def is_of_the_kernel(path: str | Path) -> bool:
    """True if a path, with links resolved, is in a folder where the kernel shows its state as files: /proc, /sys,
    /dev."""
    real = os.path.realpath(path)
    return _is_under(real, _KERNEL_FOLDERS) and not _is_under(real, _FOR_FILES)


def hole_bytes(file: BinaryIO, most_segments: int = 256) -> int:
    """Number of bytes of a file that were never written and read as zeros, up to its `most_segments`-th segment of
    data."""
    size, position, num_bytes = os.fstat(file.fileno()).st_size, 0, 0
    for _ in range(most_segments):
        if position >= size:
            break
        try:
            data = os.lseek(file.fileno(), position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a file system without information about holes
                break
            data = size  # a hole to the end
        num_bytes += data - position
        if data >= size:
            break
        position = os.lseek(file.fileno(), data, os.SEEK_HOLE)
    file.seek(0)
    return num_bytes


def write_text(path: Path, text: str) -> None:
    """Write a result of a command to a file named by the user. Raises OSError. A FIFO without a reader is refused at
    once."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666
    )
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8", newline="", errors="replace") as file:
        file.write(text)


def reason_of(error: OSError) -> str:
    """The reason of a system error, in words."""
    if error.errno == errno.ENXIO:
        return say("it is a FIFO that nobody reads, or no file")
    return system_reason(error)


def system_reason(error: OSError) -> str:
    """The reason of a system error in the system's words, of which catalogs have the usual ones."""
    return fixed(error.strerror or str(error))


def _not_regular(path: Path, kind: str, what: str) -> str:
    if kind == "a folder":
        return say("{path} is a folder; name the {what} in it", path=str(path), what=fixed(what))
    return say(
        "{path} is {kind}, not a regular file; copy what is meant into one, and name that", path=str(path), kind=kind
    )


def _too_large(path: Path, size: str, most_bytes: int) -> str:
    return say(
        "{path} has {size}, and at most {most:,} are read here; check that it is the file that was meant",
        path=str(path),
        size=size,
        most=most_bytes,
    )


def _is_under(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
