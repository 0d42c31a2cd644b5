"""The files that a user means by data.path: a file, a folder that is searched, or a glob. Nothing is opened here.

A search is bounded: it looks at so many names at most, and never enters what the kernel shows of itself (/proc, /sys,
/dev), where files have no end or wait for ever. A folder is the glob FOLDER/**.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from shardwright.config.data import STDLIB
from shardwright.config.user_file import is_of_the_kernel

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
# ORGANISATION/NAME, as the Hugging Face hub calls data sets.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w-]*")
# A file becomes about a kilobyte of memory; a name is looked at in some microseconds.
MOST_FILES, MOST_NAMES = 100_000, 1_000_000


def list_paths(text: str, faults: list[str]) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and all files, sorted; what is wrong goes to `faults`. Raises OSError or
    ValueError."""
    if text == STDLIB:
        return _list_stdlib(faults)
    if not text:
        raise ValueError("it is empty")
    path = Path(os.path.expanduser(text))
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _list_glob(path, text, faults)
    if not stat.S_ISDIR(mode):
        return path.parent, [path]
    num_faults = len(faults)
    found = _bounded(_search(path, ("**",), faults), text, faults)
    if not found and len(faults) == num_faults:
        faults.append(f"folder {path} holds no files (hidden ones are skipped); name one with text in it")
    return path, found


def unreadable(path: Path | str, error: OSError) -> str:
    """The fault of a file or folder that can't be read."""
    way_out = "check its permissions, or leave it out of data.path"
    return f"{path} can't be read: {error.strerror or error}; {way_out}"


def _list_stdlib(faults: list[str]) -> tuple[Path, list[Path]]:
    root = Path(os.__file__).parent
    # Build settings hold paths of the machine that Python was built on.
    found = [
        path
        for path in _search(root, ("**",), faults, _STDLIB_LEFT_OUT)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not found:
        faults.append(f"this Python keeps no .py files in {root}; set data.path to files of your own")
    return root, found


def _list_glob(pattern: Path, text: str, faults: list[str]) -> tuple[Path, list[Path]]:
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    if fixed == len(parts):
        way_out = f"check the path, or use data.path = {STDLIB!r}"
        if _HUB_NAME.fullmatch(text):
            way_out = (
                "nothing is downloaded while a job is run: if this is a data set of the Hugging Face hub, fetch it "
                f"first, with `hf download --repo-type dataset {text} --local-dir FOLDER`, and name that folder"
            )
        faults.append(f"there is no file or folder {text} (looked from {Path.cwd()}); {way_out}")
        return pattern, []
    root, num_faults = Path(*parts[:fixed]), len(faults)
    folders: list[Path] = []
    matches = _search(root, parts[fixed:], faults, matching_folders=folders) if root.is_dir() else iter(())
    found = sorted(_bounded(matches, text, faults))
    if not found and len(faults) == num_faults:
        way_out = "check it, or name a folder, which is searched recursively"
        also = "matches folders and no file" if folders else "matches nothing"
        faults.append(f"glob {text} {also} (looked from {Path.cwd()}); {way_out}")
    return root, found


def _bounded(paths: Iterator[Path], text: str, faults: list[str]) -> list[Path]:
    """A list of the paths, or an empty one and a fault if there are too many to hold."""
    found: list[Path] = []
    for path in paths:
        if len(found) == MOST_FILES:
            faults.append(
                f"data.path {text} has more than {MOST_FILES:,} files; join them into fewer, such as one .jsonl with a "
                "document a line, or name a part of them by a glob"
            )
            return []
        found.append(path)
    return found


def _search(
    root: Path,
    pattern: Sequence[str],
    faults: list[str],
    left_out: Collection[str] = (),
    matching_folders: list[Path] | None = None,
) -> Iterator[Path]:
    """Files under `root` that match a pattern part by part: folder by folder, names sorted, links followed.

    A folder carries at which parts of the pattern its names may be; "**" is any number of folders. Where there is one,
    no folder is searched twice, so that a link back to a folder above ends.
    """
    seen: set[str] = set()
    num_names = 0
    left = [(root, _skipping({0}, pattern))]
    while left:
        folder, states = left.pop()
        real = os.path.realpath(folder)
        if "**" in pattern and real in seen:
            continue
        seen.add(real)
        if is_of_the_kernel(real):
            faults.append(
                f"{folder} is what the kernel shows of itself, not a folder of text; name a folder on a disk, or leave "
                "this one out of data.path"
            )
            continue
        try:
            with os.scandir(folder) as listing:
                entries = sorted(islice(listing, MOST_NAMES - num_names), key=lambda entry: entry.name)
        except OSError as error:
            faults.append(unreadable(folder, error))
            continue
        num_names += len(entries)
        if num_names >= MOST_NAMES:
            faults.append(
                f"the search was ended in {folder}, after {MOST_NAMES:,} names; name a smaller folder in data.path"
            )
            return
        folders = []
        for entry in entries:
            after = _after(states, entry.name, pattern)
            if entry.is_dir():
                if len(pattern) in after and matching_folders is not None:
                    matching_folders.append(folder / entry.name)
                if after - {len(pattern)} and entry.name not in left_out:
                    folders.append((folder / entry.name, after))
            elif len(pattern) in after:
                yield folder / entry.name
        left += reversed(folders)


def _after(states: set[int], name: str, pattern: Sequence[str]) -> set[int]:
    """At which parts of a pattern the names within `name` may be; its length is the end. Hidden names match a dot."""
    found = set()
    for state in states - {len(pattern)}:
        part = pattern[state]
        if name[0] == "." and part[0] != ".":
            continue
        if part == "**":
            found.add(state)
        elif fnmatchcase(name, part):
            found.add(state + 1)
    return _skipping(found, pattern)


def _skipping(states: set[int], pattern: Sequence[str]) -> set[int]:
    """The states, and those behind a "**" that matches no folder."""
    found = set(states)
    for state in states:
        while state < len(pattern) and pattern[state] == "**":
            state += 1
            found.add(state)
    return found
