"""Storage of checkpoints: a folder of this machine, or an address that fsspec reaches. Torch is not needed.

A name is the path of a file relative to the root, at most one folder deep. A file is durable when `write` returns. On a
local disk this takes an fsync of the file and of its folder. Symbolic links are never followed, so that nothing outside
the root is read or written.
"""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shardwright.config.base import PlanError, hidden
from shardwright.config.phrase import say
from shardwright.config.secret_addresses import WAY_OUT, has_password
from shardwright.config.units import MIB

# The protocols that are allowed. The other protocols of fsspec chain, cache or interpret files, and store none.
PROTOCOLS = ("abfs", "abfss", "az", "file", "gcs", "gs", "hdfs", "memory", "oss", "s3", "s3a", "sftp", "ssh", "webhdfs")


class Storage(Protocol):
    """The interface of a storage: files, by names relative to its root."""

    root: str

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a new file, or overwrite one that an interrupted run left. Durable at the end. Raises OSError."""

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically: a reader sees the old or the new one. Durable at the end. Raises OSError."""

    def size(self, name: str) -> int:
        """The size of a regular file in bytes. Raises OSError."""

    def read(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from `start` on. Raises OSError, or EOFError if the file ends before."""

    def prefetch(self, name: str, start: int, num_bytes: int) -> None:
        """Load these bytes into the page cache, if the storage has one. This may take as long as a read. It raises no
        error."""

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted; an empty list if the folder does not exist or is a symbolic link."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists. Raises OSError."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty."""


class LocalStorage:
    """A folder of a file system that this machine sees."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        path = self._path(name)
        is_new = not os.path.isdir(self.root)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if is_new:
            _sync_folder(os.path.dirname(self.root))
        with suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                _write_all(descriptor, memoryview(part).cast("B"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _sync_folder(os.path.dirname(path))

    def replace(self, name: str, data: bytes) -> None:
        self.write(f"{name}.new", [data])
        path = self._path(name)
        os.replace(f"{path}.new", path)
        _sync_folder(os.path.dirname(path))
        _sync_folder(self.root)  # the folder itself may be new

    def size(self, name: str) -> int:
        status = os.lstat(self._path(name))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, say("not a regular file"), name)
        return status.st_size

    def read(self, name: str, start: int, buffer: memoryview) -> None:
        self.size(name)  # raises if it is not a regular file: opening a device or a pipe may have effects
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            filled = 0
            while filled < len(buffer):
                num_read = os.preadv(descriptor, [buffer[filled:]], start + filled)
                if not num_read:
                    raise EOFError(say("{name} ends at byte {end}", name=name, end=start + filled))
                filled += num_read
        finally:
            os.close(descriptor)

    def prefetch(self, name: str, start: int, num_bytes: int) -> None:
        scratch = bytearray(MIB)  # a read fills the page cache; read-ahead advice (fadvise) would stop after some KiB
        with suppress(OSError):  # the read itself will report the error
            self.size(name)
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                while num_bytes > 0 and (num_read := os.preadv(descriptor, [scratch], start)):
                    start, num_bytes = start + num_read, num_bytes - num_read
            finally:
                os.close(descriptor)

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        if os.path.islink(path):
            return []
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def remove_folder(self, folder: str) -> None:
        with suppress(OSError):
            os.rmdir(self._path(folder))

    def _path(self, name: str) -> str:
        assert not name.startswith("/") and ".." not in name.split("/"), f"{name} leads out of {self.root}"
        folder = os.path.dirname(name)
        if folder and os.path.islink(os.path.join(self.root, folder)):
            raise OSError(errno.ELOOP, say("its folder is a link, which is not followed"), name)
        return os.path.join(self.root, name)


class RemoteStorage:
    """Storage at an address that fsspec reaches. In an object store a file appears complete when it is closed. Over
    sftp, ssh or hdfs an interrupted write may leave a part of a file, which its digest reveals."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.root = address.rstrip("/")
        self._system: Any
        self._system, self._base = url_to_fs(self.root)

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        path = self._path(name)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._system.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def replace(self, name: str, data: bytes) -> None:
        self.write(name, [data])

    def size(self, name: str) -> int:
        return int(self._system.info(self._path(name))["size"] or 0)

    def read(self, name: str, start: int, buffer: memoryview) -> None:
        data = self._system.cat_file(self._path(name), start=start, end=start + len(buffer))
        if len(data) != len(buffer):
            raise EOFError(say("{name} ends at byte {end}", name=name, end=start + len(data)))
        buffer[:] = data

    def prefetch(self, name: str, start: int, num_bytes: int) -> None:
        pass

    def names(self, folder: str = "") -> list[str]:
        try:
            paths = self._system.ls(self._path(folder), detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        with suppress(OSError, NotImplementedError):
            self._system.rmdir(self._path(folder))

    def _path(self, name: str) -> str:
        assert ".." not in name.split("/"), f"{name} leads out of {self.root}"
        return f"{self._base}/{name}".rstrip("/")


def open_storage(place: str) -> Storage:
    """The storage of a folder or an address. PlanError if the address is refused or can't be reached."""
    protocol, is_address, _ = place.partition("://")
    if has_password(place):
        raise PlanError(
            "checkpoint.path", [say("{place} has a password; {way_out}", place=hidden(place), way_out=WAY_OUT)]
        )
    if not is_address:
        return LocalStorage(Path(os.path.expanduser(place)).absolute())
    if protocol not in PROTOCOLS:
        allowed = tuple(name for name in PROTOCOLS if name != "memory")  # memory is lost with the process
        raise PlanError(
            "checkpoint.path",
            [
                say(
                    "{protocol}:// is no place for checkpoints; use a folder, or {allowed}",
                    protocol=protocol,
                    allowed=allowed,
                )
            ],
        )
    if protocol == "file":
        return LocalStorage(Path("/" + place.removeprefix("file://").lstrip("/")))
    try:
        return RemoteStorage(place)
    except (ImportError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(
            "checkpoint.path",
            [say("{place} can't be reached: {reason}; use a folder, or mend that", place=place, reason=reason)],
        ) from None


def read_whole(storage: Storage, name: str, most_bytes: int) -> bytes:
    """All bytes of a file. Raises OSError, also if it has more than `most_bytes`, and EOFError."""
    size = storage.size(name)
    if size > most_bytes:
        raise OSError(
            errno.EFBIG,
            say("it has {size:,} bytes, and at most {most_bytes:,} are read", size=size, most_bytes=most_bytes),
            name,
        )
    data = bytearray(size)
    storage.read(name, 0, memoryview(data))
    return bytes(data)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(path: str) -> None:
    """Make the entries of a folder durable."""
    with suppress(PermissionError):  # if it is a parent of the root that this user may not read
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system does it without fsync, or can't do it
                raise
        finally:
            os.close(descriptor)
