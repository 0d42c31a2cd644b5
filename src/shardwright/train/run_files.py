"""The files that a run writes into its folder, and safe ways to open them.

A folder may come from an archive, or others may write to it, and it may hold links: a run that writes through a link
changes somebody else's file. So before a run begins, a name is refused if it is a link, or has another kind than the
run's file or folder. Files are opened without following links. A file to be emptied is replaced by a new file, since a
hard link to a foreign file can't be told from an own file. Someone who may write to the folder during a run can harm it
in other ways; this is no protection against that.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardwright.config.phrase import say
from shardwright.config.run_file_names import (
    BOARD,
    CARD,
    CHECKPOINTS_BELOW,
    METRICS,
    PICTURE,
    PROFILE,
    REPORT,
    TOKENS,
)
from shardwright.config.user_file import kind_of

_WAYS_OUT = {
    TOKENS: say("or name its target in data.cache"),
    CHECKPOINTS_BELOW: say("or name its target in checkpoint.path"),
}
_FILES, _FOLDERS = (
    (METRICS, "metrics.new", PICTURE, CARD, REPORT, "report.new"),
    (BOARD, PROFILE, TOKENS, CHECKPOINTS_BELOW),
)
NAMES = (*_FILES, *_FOLDERS)


def name_faults(folder: Path) -> list[str]:
    """A sentence for each name in a run's folder that is a link, through which a run would write, or that has another
    kind than the run's file or folder of this name."""
    faults = list[str]()
    for name in NAMES:
        try:
            mode = os.lstat(folder / name).st_mode
        except OSError:  # the name does not exist, or making the folder will report the error
            continue
        way_out = say("or name another folder in run.folder")
        if stat.S_ISLNK(mode):
            way_out = _WAYS_OUT.get(name, way_out)
            faults.append(
                say(
                    "{path} is a link, and a run would write through it; remove it, {way_out}",
                    path=folder / name,
                    way_out=way_out,
                )
            )
        elif not (stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)):
            kind = say("a file") if name in _FILES else say("a folder")
            faults.append(
                say(
                    "{path} is {actual}, and a run has {kind} there; remove it, {way_out}",
                    path=folder / name,
                    actual=kind_of(mode) or say("a file"),
                    kind=kind,
                    way_out=way_out,
                )
            )
    return faults


def open_own(file: Path, flags: int) -> int:
    """A descriptor of a regular file with one name: no link, no hard link, no FIFO. A missing file is made if `flags`
    have O_CREAT. Raises OSError (ELOOP for any other kind of file)."""
    descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.ELOOP, say("it is no file of its own, but a link or something else"), str(file))
    return descriptor


def open_to_append(file: Path) -> TextIO:
    """A text file, open to append lines. Raises OSError."""
    return open(open_own(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def write_anew(file: Path, text: str) -> None:
    """Replace a file of any kind by a new text file, atomically. Raises OSError."""
    new_file = file.with_suffix(".new")
    with suppress(FileNotFoundError):
        new_file.unlink()
    descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    new_file.replace(file)


def make_room(file: Path) -> None:
    """Remove a file that a library will open by name, and make its folder. Raises OSError, also if the folder is a
    link."""
    if os.path.islink(file.parent):
        raise OSError(errno.ELOOP, say("its folder is a link, which is not followed"), str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        file.unlink()
