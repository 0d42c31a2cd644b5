"""Files that a run writes into its folder: one place says which they are, and how they are opened.

A folder may come from an archive, or be one that others write to, and hold links: a file that is written through one is
somebody else's. So a name that is a link, or no file where a run has one, is refused before a run begins; files are
opened without following one, and what would be emptied is a new file instead, for a second name of the same file (a
hard link) can't be told from it. Who may write to the folder while a run goes on can harm it in other ways, and is not
kept out.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardwright.config.user_file import kind_of

METRICS, BOARD, PROFILE, PICTURE = "metrics.jsonl", "tensorboard", "profile", "experts.svg"
TOKENS, CHECKPOINTS_BELOW = "data", "checkpoints"
_WAYS_OUT = {TOKENS: "or name its target in data.cache", CHECKPOINTS_BELOW: "or name its target in checkpoint.path"}
_FILES, _FOLDERS = (METRICS, "metrics.new", PICTURE), (BOARD, PROFILE, TOKENS, CHECKPOINTS_BELOW)
NAMES = (*_FILES, *_FOLDERS)


def name_faults(folder: Path) -> list[str]:
    """A sentence for each name in a run's folder that is a link, and would be written through, or something else than
    what a run has under that name."""
    faults = []
    for name in NAMES:
        try:
            mode = os.lstat(folder / name).st_mode
        except OSError:  # it is not there, or the folder says what is wrong when it is made
            continue
        way_out = "or name another folder in run.folder"
        if stat.S_ISLNK(mode):
            way_out = _WAYS_OUT.get(name, way_out)
            faults.append(f"{folder / name} is a link, and a run would write through it; remove it, {way_out}")
        elif not (stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)):
            kind = "a file" if name in _FILES else "a folder"
            faults.append(
                f"{folder / name} is {kind_of(mode) or 'a file'}, and a run has {kind} there; remove it, {way_out}"
            )
    return faults


def open_own(file: Path, flags: int) -> int:
    """A descriptor of a file that is nobody else's: no link, no second name, and no FIFO. It is made where it is not
    there and `flags` have O_CREAT. Raises OSError (ELOOP for what is not its own)."""
    descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.ELOOP, "it is no file of its own, but a link or something else", str(file))
    return descriptor


def open_to_append(file: Path) -> TextIO:
    """A text file to add lines to. Raises OSError."""
    return open(open_own(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def write_anew(file: Path, text: str) -> None:
    """Put a new text file in the place of one, whatever that is; it is the old or the new one at any time. Raises
    OSError."""
    new = file.with_suffix(".new")
    with suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
    new.replace(file)


def make_room(file: Path) -> None:
    """Remove a file that a library will open by its name, and make its folder. Raises OSError, as where the folder is
    a link."""
    if os.path.islink(file.parent):
        raise OSError(errno.ELOOP, "its folder is a link, which is not followed", str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        file.unlink()
