"""A file that a command writes because the user named one."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from shardwright.config.base import PlanError, error_text
from shardwright.config.phrase import say, with_changed_texts
from shardwright.config.user_file import reason_of, write_text

_HEADER_CHARS = 24  # characters at the beginning that all files of a kind share

# Errors that do not depend on the name: the command worked, and the disk failed.
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def write_output(path: Path, text: str, option: str) -> None:
    """Write the result of a command. PlanError if no such file can be written, OSError if the disk is full or fails.

    An existing file is replaced only if it begins as the text does: otherwise it may be the job that was read. On a
    full disk it keeps its text, and of a new one nothing is left.
    """
    refuse_other_file(path, text, option)
    before = _bytes_before(path)
    try:
        write_text(path, text)
    except OSError as error:
        if error.errno in _DISK_ERRNOS:
            _put_back(path, before)
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise _unwritable(path, option, error) from None
    except ValueError as error:  # a NUL in the name
        raise PlanError(
            say("output"),
            [
                say(
                    "{option} {path} is no name of a file: {reason}; use another",
                    option=option,
                    path=repr(str(path)),
                    reason=error_text(error),
                )
            ],
        ) from None


def _bytes_before(path: Path) -> bytes | None:
    """The bytes of a regular file, none of one that is not there yet; None of anything else, or if it can't be read."""
    with suppress(OSError, ValueError):
        if path.is_file():
            return path.read_bytes()
        return None if path.exists() or path.is_symlink() else b""
    return None


def _put_back(path: Path, before: bytes | None) -> None:
    """Give a file its bytes again that could not be written anew; one that had none is removed."""
    with suppress(OSError):
        if before:
            path.write_bytes(before)
        elif before is not None:
            path.unlink(missing_ok=True)


def refuse_no_folder(path: Path, option: str) -> None:
    """Raise PlanError if the folder of a file that a command will write is none, or lets nobody write: before the work,
    which may take minutes."""
    number = 0
    if not path.parent.is_dir():
        number = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
    elif not path.exists() and not os.access(path.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise _unwritable(path, option, OSError(number, os.strerror(number)))


def _unwritable(path: Path, option: str, error: OSError) -> PlanError:
    """The fault of a file that can't be written, with a way out."""
    way_out = say("name another with {option}, or check the folder and its permissions", option=option)
    fault = say(
        "{option} {path} can't be written: {reason}; {way_out}",
        option=option,
        path=str(path),
        reason=reason_of(error),
        way_out=way_out,
    )
    return PlanError(say("output"), [fault])


def replace_output(path: Path, text: str, option: str, dry_run: bool = False) -> None:
    """Write the result of a command atomically: the file is the old or the new one, and never a part. With `dry_run`
    only check that it can be written. Raises the errors of `write_output`.

    A path that exists and is no regular file, such as a FIFO, is written to directly.
    """
    if path.exists() and not path.is_file():
        if not dry_run:
            write_output(path, text, option)
        elif path.is_dir():
            raise PlanError(
                say("output"), [say("{option} {path} is a folder; name a file in it", option=option, path=path)]
            )
        return
    refuse_other_file(path, text, option)

    def named(text: str) -> str:
        return text.replace(str(new_path), str(path))

    new_path = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write_output(new_path, text, option)
        if not dry_run:
            new_path.replace(path)
    except PlanError as error:
        raise PlanError(say("output"), [with_changed_texts(fault, named) for fault in error.faults]) from None
    finally:
        with suppress(OSError, ValueError):
            new_path.unlink(missing_ok=True)


def refuse_other_file(path: Path, text: str, option: str) -> None:
    """Raise PlanError if the file exists and was not written by this option."""
    if _has_other_header(path, text):
        refusal = say(
            "{option} {path} is there, and is no file that {option} wrote: it would be lost; name another file",
            option=option,
            path=path,
        )
        raise PlanError(say("output"), [refusal])


def _has_other_header(path: Path, text: str) -> bool:
    """True if the file is not empty and its first characters differ from those of `text`. An unreadable file counts as
    matching: the write then reports the error."""
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                return file.read(4 * _HEADER_CHARS).decode("utf-8", "replace")[:_HEADER_CHARS] != text[:_HEADER_CHARS]
    return False
