"""Files that a file names and that lie beside it or above: the model's config.json, an engine's configuration, what a
system's files begin from."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path, PurePath

from shardwright.config.phrase import say
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, read_text
from shardwright.interchange.reading.configuration_keys import ENGINE_KEYS, OPTION_KEYS, line_beginning
from shardwright.interchange.reading.hydra_defaults import base_paths
from shardwright.interchange.reading.plain_data import read_data

_MODEL_FOLDER = re.compile(r"\b(?:base_model|model_name_or_path|config_name)[\"']?[:=\s]\s*[\"']?([\w./-]+)")
_OF_DEEPY = re.compile(
    r"\bdeepy\.py[\"']?[ \t]+\S{1,200}\.py[ \t]+(?:(?:-d|--conf_dir)[ =](\S{1,200})[ \t]+)?((?:[\w./-]{1,200}[ \t]*)+)"
)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
# Names and paths have a most length, so that a long line is read in a time that grows no faster than it.
_FILE = r"((?:\$\{?\w{1,64}\}?/|/)?[\w.-][\w./-]{0,512}\.(?:json|ya?ml|toml))\b"
_VARIABLE = re.compile(r"^\$\{?\w{1,64}\}?/")  # the folder that a path begins with
_PATH = rf"[\w-]{{0,64}}[\"']?[:=\s]-?\s*[\"']?{_FILE}"
# Settings and variables of scripts that name the configuration of DeepSpeed, of FSDP or Accelerate, of a program.
_ENGINES = (
    re.compile(rf"(?i)\b(?:deepspeed|ds)(?:_config)?{_PATH}"),
    re.compile(rf"(?i)\b(?:fsdp|accelerate|config_file){_PATH}"),
    re.compile(
        r"\b(?:axolotl(?:\.cli\.|\s+)train|llamafactory-cli\s+train|llamafactory\.(?:launcher|cli\s+train)"
        r"|swift\s+(?:sft|pt)(?:\s+--config)?"
        r"|src/train\.py|yaml[-_]cfg|config-file)[=\s]\s*"
        rf"[\"']?{_FILE}"
    ),
    re.compile(rf"(?m)^[ \t]*(?:export[ \t]+)?CONFIG(?:_PATH)?=[\"']?{_FILE}"),
    re.compile(rf"\.py[\"']?\s[^#;&|]{{0,512}}?--config[=\s]\s*[\"']?{_FILE}"),
    re.compile(rf"(?:\.py|-m[ \t]+[\w.]{{1,200}})[\"']?\s(?:\\\s)?\s*[\"']?{_FILE}"),  # a program's first argument
)
_CD = re.compile(r"(?m)^[ \t]*(?:cd|pushd)[ \t]+[\"']?(?:\$\{?\w{1,64}\}?/)?([\w./-]{1,512})")
CLIMBING = re.compile(r"^(?:\.{1,2}/){1,3}")
# Sources of a configuration that a script makes: a variable that is called so, or a file that sed reads.
_TEMPLATES = (
    re.compile(rf"(?i)\b\w{{0,40}}template\w{{0,40}}=[\"']?{_FILE}"),
    re.compile(rf"\bsed[ \t](?:[^|;&\n]|\\\n){{0,512}}?[ \t]{_FILE}"),
)
_OF_ENGINES = re.compile(rf"{line_beginning(*chain.from_iterable(ENGINE_KEYS))}\b", re.MULTILINE)
_OF_PROGRAMS = re.compile(rf"{line_beginning(*OPTION_KEYS, 'fsdp_config')}[\"']?[ \t]*:", re.MULTILINE)
_MODEL_FILE = re.compile(rf"\bconfig_name[=\s]\s*[\"']?{_FILE}")
_YAML = (".yaml", ".yml")
_MOST_BYTES, _MOST_BASES = MIB, 16
_MOST_ABOVE, _MOST_ROUNDS, _MOST_ENDS = 6, 3, 12
_MOST_IN_LIBRARY, _MOST_NAMED = 400, 64


def text_of(path: Path) -> str:
    """The text of a file, or of the config.json in a folder. FileFault or OSError if it can't be read."""
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise FileFault(say("{path} is a folder, and there is no config.json in it; name the file", path=str(path)))
        path = path / "config.json"
    return read_text(path, _MOST_BYTES, say("launch script or configuration"))


def model_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The config.json of the model whose folder a text names, relative to a file or to the working folder, by its path;
    empty if one is named by the user, or none is there. FileFault or OSError if it can't be read."""
    if any(PurePath(name).name == "config.json" or os.path.isdir(name) for name in texts):
        return {}
    folders = [match for text in texts.values() for match in _MODEL_FOLDER.findall(text)]
    paths = [place / folder / "config.json" for folder in folders for place in (file.parent, Path())]
    named = {match for text in texts.values() for match in _MODEL_FILE.findall(_COMMENT.sub("", text))}
    paths += [path for name in sorted(named) if len(named) == 1 and (path := below(file, name)) is not None]
    return {str(path): text_of(path) for path in list(filter(os.path.isfile, paths))[:1]}


def folder_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The configurations of GPT-NeoX that a command names with or without their folder (-d), by path; without those of
    a name that is there. None is taken if one of them is not there. FileFault or OSError if one can't be read."""
    names = {PurePath(name).name for name in texts}
    taken: dict[str, str] = {}
    for text in texts.values():
        for folder, words in _OF_DEEPY.findall(_COMMENT.sub("", text).replace("\\\n", " ")):
            wanted = [word if word.endswith(_YAML) else f"{word}.yml" for word in words.split()]
            paths = [below(file, f"{folder}/{word}" if folder else word) for word in wanted]
            there = {str(path): text_of(path) for path in paths if path is not None and path.name not in names}
            taken |= there if None not in paths else {}
    return taken


def engine_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The configurations that the texts name and the user does not, by path: those below the folder of a file, a folder
    above it or the working folder. Of several of one kind none is taken, for it is not known which counts; and none
    beside a configuration of the user's that no text names, which may be in its place. FileFault or OSError if one that
    is there can't be read."""
    known = dict(texts)
    if _has_unnamed(file, texts):
        return {}
    for _ in range(_MOST_ROUNDS):
        names = {PurePath(name).name for name in known}
        plain = [_COMMENT.sub("", text) for text in known.values()]
        folders = _entered(file, plain)
        for pattern in _ENGINES:
            named = {match for text in plain for match in pattern.findall(text)}
            for path in _taken(file, named, folders):
                if path.name not in names or _is_another_config(path, known):
                    known[str(path)] = text_of(path)
    return {name: text for name, text in known.items() if name not in texts}


def argument_texts(file: Path, arguments: Sequence[str], texts: Mapping[str, str]) -> dict[str, str]:
    """The configurations that arguments of a script name, as far as they are there, by path; without those of a name
    that is there. FileFault or OSError if one that is there can't be read."""
    names = {PurePath(name).name for name in texts}
    named = [name for argument in arguments for name in re.findall(rf"(?:^|=){_FILE}$", argument)]
    paths = [path for name in named if (path := below(file, name)) is not None and path.name not in names]
    return {str(path): text_of(path) for path in dict.fromkeys(paths[:_MOST_BASES])}


def rival_texts(file: Path, texts: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The configurations of some names, those of commands of a script, and further ones that texts name, as far as they
    are there, by path; the training command tells which of them counts. Of files of one name none is taken, and none
    where `engine_texts` takes none. FileFault or OSError if one can't be read."""
    if _has_unnamed(file, texts):
        return {}
    known = dict(texts)
    wanted = [*named]
    for _ in range(_MOST_ROUNDS):
        plain = [_COMMENT.sub("", text) for text in known.values()]
        folders = _entered(file, plain)
        wanted += [name for pattern in _ENGINES for text in plain for name in pattern.findall(text)]
        ends = [CLIMBING.sub("", name) for name in [*dict.fromkeys(wanted)][:_MOST_NAMED]]
        there = [path for name in ends if (path := below(file, name, folders)) is not None and str(path) not in known]
        paths = [path for path in dict.fromkeys(there) if _says_plan_or_options(path)][:_MOST_BASES]
        names = [PurePath(name).name for name in (*known, *map(str, paths))]
        known |= {str(path): text_of(path) for path in paths if names.count(path.name) == 1}
    return {name: text for name, text in known.items() if name not in texts}


def template_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The files beside a script that it makes configurations of, by path; without those of a name that is there.
    FileFault or OSError if one can't be read."""
    names = {PurePath(name).name for name in texts}
    text = _COMMENT.sub("", texts.get(str(file), ""))
    named = sorted({name for pattern in _TEMPLATES for name in pattern.findall(text)})
    paths = [path for name in named if (path := below(file, name)) is not None and path.name not in names]
    return {str(path): text_of(path) for path in paths[:_MOST_BASES]}


def _entered(file: Path, texts: Sequence[str]) -> list[Path]:
    """The folders that scripts go to (cd), which names are relative to there, as far as they lie below a folder above a
    file: of a path that another machine has, its end counts."""
    ends = ["/".join(parts[-count:]) for parts in _folders_of_cd(texts) for count in range(len(parts), 0, -1)]
    places = list(file.absolute().parents)[:_MOST_ABOVE]
    return [place / end for end in ends[:_MOST_ENDS] for place in places if os.path.isdir(place / end)]


def _folders_of_cd(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The parts of the names of folders that scripts go to, without those that climb."""
    names = [name.strip("/") for text in texts for name in _CD.findall(text)[:_MOST_ENDS]]
    paths = [PurePath(name).parts[-_MOST_ABOVE:] for name in names if name.strip("./")]
    return [parts for parts in paths if ".." not in parts]


def _taken(file: Path, named: Collection[str], folders: Sequence[Path]) -> list[Path]:
    """The files to take of some names: a single one, or one that says how things are split and one with the options of
    the program. They lie below one of some folders, too."""
    named = {_VARIABLE.sub("", name): name for name in sorted(named, reverse=True)}.values()
    beside = [CLIMBING.sub("", name) for name in sorted(named)]  # a folder beside that of the script lies below others
    paths = [path for name in beside if (path := below(file, name, folders)) is not None]
    if len(named) == 1 or len(paths) != len(named) or len(named) > len(_Kind):
        return paths if len(named) == 1 else []
    return paths if len({_kind_of(path) for path in paths}) == len(paths) else []


class _Kind(Enum):
    ENGINE, OPTIONS = range(2)


def _says_plan_or_options(path: Path) -> bool:
    """True for a file that says how things are split or has options of a program, and not for one of data."""
    try:
        text = text_of(path)
    except (FileFault, OSError):
        return False
    return bool(_OF_ENGINES.search(text) or _OF_PROGRAMS.search(text))


def _kind_of(path: Path) -> _Kind:
    """The kind of a configuration: how a launcher splits things, or the options of a program."""
    return _Kind.ENGINE if _OF_ENGINES.search(text_of(path)) else _Kind.OPTIONS


def base_texts(file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The files of groups that a configuration begins from by Hydra's defaults, and those that these do, which lie
    where Hydra seeks them, by path; without those of a name that is there. A file beside the configuration itself is
    asked for. FileFault or OSError if one can't be read; ShellFault for a file that is no configuration."""
    result: dict[str, str] = {}
    names = {PurePath(name).name for name in texts}
    pending = [(file, text) for name, text in texts.items() if Path(name) == file and file.suffix in _YAML]
    while pending and len(result) < _MOST_BASES:
        place, text = pending.pop(0)
        for path in base_paths(read_data(place.name, text)) if "defaults" in text else ():
            if place == file and "/" not in path:
                continue
            path_there = next((folder / path for folder in (place.parent, file.parent) if _is_base(folder, path)), None)
            if path_there is not None and path_there.name not in names:
                names.add(path_there.name)
                result[str(path_there)] = text_of(path_there)
                pending.append((path_there, result[str(path_there)]))
    return result


def _is_base(folder: Path, path: str) -> bool:
    return ".." not in PurePath(path).parts and not path.startswith("/") and os.path.isfile(folder / path)


def _is_another_config(path: Path, texts: Collection[str]) -> bool:
    """True if a file is a config.json, as options of programs may stand in, and none of some files."""
    return path.name == "config.json" and path.resolve() not in {Path(name).resolve() for name in texts}


def library_texts(folders: Sequence[str], file: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """The YAML files of a system's folders that lie in a folder above a file, by path; without those of the same name
    as one of `texts`."""
    names = {PurePath(name).name for name in texts}
    paths = [
        path
        for folder in folders
        for above in file.absolute().parents
        for path in sorted((above / folder).glob("*.yaml"))
    ]
    return {str(path): text_of(path) for path in paths[:_MOST_IN_LIBRARY] if path.name not in names}


def _has_unnamed(file: Path, texts: Mapping[str, str]) -> bool:
    """True if a configuration behind the first file is none that the texts name, and no config.json."""
    named = {PurePath(name).name for text in texts.values() for pattern in _ENGINES for name in pattern.findall(text)}
    others = [PurePath(name) for name in texts if Path(name) != file]
    return any(
        path.suffix in (".json", ".yaml", ".yml", ".toml") and path.name not in {*named, "config.json"}
        for path in others
    )


def below(file: Path, name: str, folders: Sequence[Path] = ()) -> Path | None:
    """The file of a name below the folder of a file, the folders above it, the working folder or one of others; None if
    none is. Of a path from the root, which another machine has, its end counts: a folder and the file in it, at
    least; and so it does of a path that begins with a variable."""
    rest = _VARIABLE.sub("", name)
    is_elsewhere = rest != name or name.startswith("/")
    rest = rest if rest == name else CLIMBING.sub("", rest)
    parts = PurePath(rest).parts
    if ".." in parts:
        return None
    ends = ["/".join(parts[start:]) for start in range(1, len(parts) - 1)] if is_elsewhere else []
    ends = ends if rest.startswith("/") else [rest, *ends]
    places = [Path(), *list(file.absolute().parents)[:_MOST_ABOVE], *folders]
    paths = (place / end for end in ends[:_MOST_ENDS] for place in places)
    return next((path for path in paths if os.path.isfile(path)), None)
