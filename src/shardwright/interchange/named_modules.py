"""Python files that a system's files name as modules, and that lie beside the script, above its folder, or below it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from shardwright.interchange.imported import Asked
from shardwright.interchange.named_files import below, text_of
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SourceSystem

_MOST_ROUNDS, _MOST_MODULES, _MOST_FOLDERS, _MOST_DEEP = 3, 8, 2000, 6
_OF_TOOLS = ("venv", "env", "node_modules", "site-packages", "build", "dist")


def module_texts(system: SourceSystem, file: Path, texts: Mapping[str, str], asked: Asked) -> dict[str, str]:
    """The Python files that the texts name and the user does not, by path. Below the folder of the first file one is
    taken if no other has the same end of its path, of two parts at least. FileFault or OSError if one that is there
    can't be read."""
    known = dict(texts)
    for _ in range(_MOST_ROUNDS if system.modules else 0):
        for end in _named(system, known, asked):
            path = below(file, end) or _alone_below(file.parent, PurePath(end).parts)
            if path is not None and len(known) - len(texts) < _MOST_MODULES:
                known.setdefault(str(path), text_of(path))
    return {name: text for name, text in known.items() if name not in texts}


def _named(system: SourceSystem, texts: Mapping[str, str], asked: Asked) -> list[str]:
    """The ends of paths that texts name and that none of them has; none if a text can't be read, which its reader
    tells."""
    assert system.modules is not None
    try:
        ends = system.modules(texts, asked.without_left_out())
    except (ShellFault, RecursionError):
        return []
    paths = [PurePath(name).parts for name in texts]
    return [end for end in ends if not any(_has_end(parts, PurePath(end).parts) for parts in paths)]


def _has_end(parts: tuple[str, ...], end: tuple[str, ...]) -> bool:
    """True if a path ends as another one does, in two parts or in all that it has."""
    count = min(2, len(end))
    return parts[-count:] == end[-count:]


def _alone_below(folder: Path, end: tuple[str, ...]) -> Path | None:
    """The file below a folder that has most of the last parts of a path, two at least; None if several have as many."""
    if len(end) < 2:
        return None
    most, paths = 2, list[Path]()
    for path in _files_called(folder, end[-1]):
        parts = path.parts
        shared = next((count for count in range(len(end), 1, -1) if parts[-count:] == end[-count:]), 0)
        if shared >= most:
            paths = [path] if shared > most else [*paths, path]
            most = max(most, shared)
    return paths[0] if len(paths) == 1 else None


def _files_called(folder: Path, name: str) -> Iterator[Path]:
    """The files of a name below a folder, a few folders deep, without those of tools."""
    start = len(folder.parts)
    for number, (place, folders, files) in enumerate(os.walk(folder)):
        if number >= _MOST_FOLDERS:
            return
        is_deep = len(Path(place).parts) - start >= _MOST_DEEP
        folders[:] = [] if is_deep else sorted(f for f in folders if not f.startswith(".") and f not in _OF_TOOLS)
        if name in files:
            yield Path(place, name)
