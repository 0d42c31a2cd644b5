"""The files that data.path names: a file, a folder, which is searched, or a glob. No file is opened here.

A search is bounded: it looks at a limited number of names, and never enters the kernel's file systems (/proc, /sys,
/dev), whose files may have no end or block for ever. A folder is searched as the glob FOLDER/**.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from shardwright.config.data import STDLIB
from shardwright.config.phrase import say
from shardwright.config.user_file import is_of_the_kernel, system_reason

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
# ORGANISATION/NAME, as the Hugging Face hub calls data sets.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w-]*")
# A file takes about a kilobyte of memory; a name takes some microseconds.
MOST_FILES, MOST_NAMES = 100_000, 1_000_000


def list_paths(text: str, faults: list[str]) -> tuple[Path, list[Path]]:
    """(the folder that names are relative to, all files). Files of a glob are sorted by path; those of a folder come
    folder by folder, each folder's own files before those of its subfolders. Faults are appended to `faults`. Raises
    OSError or ValueError."""
    if text == STDLIB:
        return _list_stdlib(faults)
    if not text:
        raise ValueError(say("it is empty"))
    path = Path(os.path.expanduser(text))
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _list_glob(path, text, faults)
    if not stat.S_ISDIR(mode):
        return path.parent, [path]
    num_faults = len(faults)
    paths = _bounded(_search(path, ("**",), faults), text, faults)
    if not paths and len(faults) == num_faults:
        faults.append(
            say("folder {path} holds no files (hidden ones are skipped); name one with text in it", path=path)
        )
    return path, paths


def unreadable(path: Path | str, error: OSError) -> str:
    """The fault of a file or folder that can't be read."""
    way_out = say("check its permissions, or leave it out of data.path")
    return say("{path} can't be read: {reason}; {way_out}", path=path, reason=system_reason(error), way_out=way_out)


def _list_stdlib(faults: list[str]) -> tuple[Path, list[Path]]:
    root = Path(os.__file__).parent
    # Files of build settings (_sysconfigdata*) hold paths of the machine that built Python.
    paths = [
        path
        for path in _search(root, ("**",), faults, _STDLIB_LEFT_OUT)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not paths:
        faults.append(say("this Python keeps no .py files in {root}; set data.path to files of your own", root=root))
    return root, paths


def _list_glob(pattern: Path, text: str, faults: list[str]) -> tuple[Path, list[Path]]:
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    if fixed == len(parts):
        way_out = say("check the path, or use data.path = {stdlib}", stdlib=repr(STDLIB))
        if _HUB_NAME.fullmatch(text):
            way_out = say(
                "nothing is downloaded while a job is run: if this is a data set of the Hugging Face hub, fetch it "
                "first, with `hf download --repo-type dataset {text} --local-dir FOLDER`, and name that folder",
                text=text,
            )
        faults.append(
            say(
                "there is no file or folder {text} (looked from {current}); {way_out}",
                text=text,
                current=Path.cwd(),
                way_out=way_out,
            )
        )
        return pattern, []
    root, num_faults = Path(*parts[:fixed]), len(faults)
    folders: list[Path] = []
    matches = _search(root, parts[fixed:], faults, matching_folders=folders) if root.is_dir() else iter(())
    paths = sorted(_bounded(matches, text, faults))
    if not paths and len(faults) == num_faults:
        way_out = say("check it, or name a folder, which is searched recursively")
        also = say("matches folders and no file") if folders else say("matches nothing")
        faults.append(
            say(
                "glob {text} {also} (looked from {current}); {way_out}",
                text=text,
                also=also,
                current=Path.cwd(),
                way_out=way_out,
            )
        )
    return root, paths


def _bounded(paths: Iterator[Path], text: str, faults: list[str]) -> list[Path]:
    """The paths as a list; if there are too many, an empty list and a fault."""
    listed: list[Path] = []
    for path in paths:
        if len(listed) == MOST_FILES:
            faults.append(
                say(
                    "data.path {text} has more than {most_files:,} files; join them into fewer, such as one .jsonl "
                    "with a document a line, or name a part of them by a glob",
                    text=text,
                    most_files=MOST_FILES,
                )
            )
            return []
        listed.append(path)
    return listed


def _search(
    root: Path,
    pattern: Sequence[str],
    faults: list[str],
    left_out: Collection[str] = (),
    matching_folders: list[Path] | None = None,
) -> Iterator[Path]:
    """Files under `root` that match a pattern, given as its parts: folder by folder, names sorted, links followed.

    Each folder carries states: the indices of the pattern's parts that names in it may match. "**" matches any number
    of folders. With "**" no folder is searched twice, so links back to a parent folder do no harm.
    """
    searched: set[str] = set()
    num_names = 0
    pending = [(root, _skipping({0}, pattern))]
    while pending:
        folder, states = pending.pop()
        real = os.path.realpath(folder)
        if "**" in pattern and real in searched:
            continue
        searched.add(real)
        entries = _entries(folder, real, MOST_NAMES - num_names, faults)
        num_names += len(entries)
        if num_names >= MOST_NAMES:
            faults.append(
                say(
                    "the search was ended in {folder}, after {most_names:,} names; name a smaller folder in data.path",
                    folder=folder,
                    most_names=MOST_NAMES,
                )
            )
            return
        folders = []
        for entry in entries:
            next_states = _next_states(states, entry.name, pattern)
            if entry.is_dir():
                if len(pattern) in next_states and matching_folders is not None:
                    matching_folders.append(folder / entry.name)
                if next_states - {len(pattern)} and entry.name not in left_out:
                    folders.append((folder / entry.name, next_states))
            elif len(pattern) in next_states:
                yield folder / entry.name
        pending += reversed(folders)


def _entries(folder: Path, real: str, most: int, faults: list[str]) -> list[os.DirEntry[str]]:
    """The first `most` entries of a folder, sorted by name; none, and a fault, if it can't or may not be read. Links in
    its path lead to `real`."""
    if is_of_the_kernel(real):
        faults.append(
            say(
                "{folder} is what the kernel shows of itself, not a folder of text; name a folder on a disk, or "
                "leave this one out of data.path",
                folder=folder,
            )
        )
        return []
    try:
        with os.scandir(folder) as listing:
            return sorted(islice(listing, most), key=lambda entry: entry.name)
    except OSError as error:
        faults.append(unreadable(folder, error))
        return []


def _next_states(states: set[int], name: str, pattern: Sequence[str]) -> set[int]:
    """The states after `name` has matched; the length of the pattern is the final state. A part matches hidden names
    only if it begins with a dot."""
    next_states = set()
    for state in states - {len(pattern)}:
        part = pattern[state]
        if name[0] == "." and part[0] != ".":
            continue
        if part == "**":
            next_states.add(state)
        elif fnmatchcase(name, part):
            next_states.add(state + 1)
    return _skipping(next_states, pattern)


def _skipping(states: set[int], pattern: Sequence[str]) -> set[int]:
    """The states, and the states after each "**" that matches no folder."""
    reached = set(states)
    for state in states:
        while state < len(pattern) and pattern[state] == "**":
            state += 1
            reached.add(state)
    return reached
