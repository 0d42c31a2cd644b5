"""Scripts that a script sources or starts and that lie beside it, below its folder, or in a folder above."""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from shardwright.interchange.make_recipes import recipes_script
from shardwright.interchange.named_files import CLIMBING, below, text_of

_ENDINGS = (".sh", ".bash", ".env", ".sbatch", ".slurm")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
# The path behind source, ., bash, sh, sbatch or srun, with options between, or a path that begins a command; names have
# a most length, so that reading takes no longer than a long line is long.
_STARTED = re.compile(
    r"(?:(?:^|[\s;&|({`\"'])(?:source|\.|bash|sh|sbatch|srun)[ \t]+(?:-{1,2}\w[\w=:,./-]{0,64}[ \t]+){0,8}[\"']?"
    r"|(?:^|[;&|({`\"'])[ \t]*(?=\./))"
    r"(?:\$\((?:[^()\n]|\([^()\n]{0,100}\)){1,200}\)[\"']?/)?"
    r"([\w.$/{}-]{0,256}\.(?:sh|bash|env|sbatch|slurm))\b",
    re.MULTILINE,
)
_VARIABLE = re.compile(r".*\$(?:\{\w+\}|\w+)/?")  # the path up to the end of its last variable
_MOST_ROUNDS, _MOST_SCRIPTS = 3, 8


def script_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The scripts that a script sources or starts, and those that these do, by path: files of their path below the
    folder of the first one, a folder above it or the working folder. A path that begins with a variable, or with what a
    command prints, counts from there on. None beside further scripts of the user's, who then says which there are.
    FileFault or OSError if one that is there can't be read."""
    if any(PurePath(name).suffix.lower() in _ENDINGS for name in texts if Path(name) != file):
        return {}
    known = {str(file): next((text for name, text in texts.items() if Path(name) == file), "")}
    for _ in range(_MOST_ROUNDS):
        for path in [path for text in known.values() for path in _started(file, text)]:
            is_known = any(PurePath(name).name == path.name for name in known)
            if not is_known and len(known) <= _MOST_SCRIPTS:
                text = text_of(path)
                recipes = recipes_script(path.name, text)  # of a Makefile that another one includes
                known |= {f"{path}.sh": recipes} if recipes else {str(path): text}
    return {name: text for name, text in known.items() if name != str(file)}


def _started(file: Path, text: str) -> list[Path]:
    """The scripts there are of those that a text sources or starts, in the order of their names."""
    names = {_VARIABLE.sub("", name) for name in _STARTED.findall(_COMMENT.sub("", text))}
    plain = [name for name in sorted(names) if name.strip("./") and not name.startswith("/")]
    paths = [_place(file, name) or _place(file, name.removesuffix(".sh")) for name in plain]
    return [path for path in paths if path is not None and path.resolve() != file.resolve()]


def _place(file: Path, name: str) -> Path | None:
    """The file of a script's name: from the folder of the first script if it climbs, and else below that folder or one
    above it."""
    beside = Path(os.path.normpath(file.parent / name))
    if CLIMBING.match(name) and os.path.isfile(beside):
        return beside
    return below(file, CLIMBING.sub("", name))
