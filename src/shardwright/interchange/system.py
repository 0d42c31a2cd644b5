"""The systems whose jobs are read and written, by the names that commands take."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text, printable, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say, with_changed_texts
from shardwright.config.user_file import FileFault, system_reason
from shardwright.interchange.imported import Asked, Imported, ReadResult, imported
from shardwright.interchange.named_files import engine_texts, library_texts, model_texts, text_of
from shardwright.interchange.reading.file_signs import OWN, FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.systems import (
    accelerate,
    deepspeed,
    flagscale,
    gpt_neox,
    lightning,
    megatron,
    megatron_bridge,
    ms_swift,
    nanotron,
    nemo,
    picotron,
    primus,
    torchtitan,
    torchtitan_toml,
    trainer_files,
)
from shardwright.interchange.unread_systems import UNREAD_SYSTEMS, UnreadSystem

_MOST_FILES = 16


@dataclass(frozen=True)
class SourceSystem:
    """One system whose files are read. `prefix` stands before the names of settings in messages."""

    name: str
    title: str
    prefix: str
    read: Callable[[Mapping[str, str], Asked], ReadResult]
    others: Mapping[str, str] = field(
        default_factory=dict, kw_only=True
    )  # suffix of a file -> system of another release
    variables: tuple[str, ...] = field(default=(), kw_only=True)  # that its reader takes, beside those of the files
    library: tuple[str, ...] = field(
        default=(), kw_only=True
    )  # folders above the first file, with files it begins from
    signs: tuple[FileSigns, ...] = field(kw_only=True)  # by which its files are known
    takes: tuple[str, ...] | None = field(default=None, kw_only=True)  # systems of its files; None if any are


@dataclass(frozen=True)
class System(SourceSystem):
    """One system whose files are read and written: a function that writes files, and `settings`, which returns a job's
    settings under the names of the system."""

    write: Callable[[JobSpec], dict[str, str]]
    settings: Callable[[JobSpec], dict[str, Any]]
    has: Mapping[str, tuple[Any, ...]]  # field of the plan -> values that a search may take
    software: str  # the generation of software as which its plans are priced


_OPTIONS_OF = ("trl", "llamafactory")  # programs whose options go with engines' files
# For fields that a search chooses: the values that a system is known to have. Writing a plan finds the other limits.
_NANOTRON_HAS: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "gpipe"),
    "zero": (0, 1),
    "offload_activations": (False,),
    "recompute": ("none", "full"),
}
_ATTENTION: tuple[Any, ...] = (["attention"], ["norm"])
_MEGATRON_HAS: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "interleaved-1f1b"),
    "zero": (0, 1),
    "offload_activations": (False,),
    "recompute_operators": _ATTENTION,
}
_TORCHTITAN_HAS: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "zb-v", "dualpipev"),
    "zero": (0, 2, 3),
    "offload_activations": (False,),
    "recompute_operators": (["attention"], ["norm", "activation"]),
}
_DEEPSPEED_HAS: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b",),
    "offload_activations": (False,),
    "sequence_parallel": (False,),
    "recompute": ("none", "full"),
}

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "megatron", "Megatron-LM", "--", megatron.read, megatron.write, megatron.flags, _MEGATRON_HAS,
            "megatron-core", signs=megatron.SIGNS,
        ),
        System(
            "nemo", "NeMo", "", nemo.read, nemo.write, nemo.settings_of, _MEGATRON_HAS, "nemo", signs=nemo.SIGNS,
            takes=(),
        ),
        System(
            "primus", "Primus", "", primus.read, primus.write, primus.settings_of, _MEGATRON_HAS, "megatron-core",
            library=primus.LIBRARY, signs=primus.SIGNS,
        ),
        System(
            "torchtitan", "torchtitan", "", torchtitan.read, torchtitan.write, torchtitan.settings_of,
            _TORCHTITAN_HAS, "torchtitan-2025", others={".toml": "torchtitan-0.2"}, variables=(torchtitan.CONFIG,),
            signs=torchtitan.SIGNS, takes=(),
        ),
        System(
            "torchtitan-0.2", "torchtitan 0.2", "", torchtitan_toml.read, torchtitan_toml.write,
            torchtitan_toml.settings_of, _TORCHTITAN_HAS, "torchtitan-2025", signs=torchtitan_toml.SIGNS, takes=(),
        ),
        System(
            "deepspeed", "DeepSpeed", "", deepspeed.read, deepspeed.write, deepspeed.settings_of, _DEEPSPEED_HAS,
            "fsdp-2024", signs=deepspeed.SIGNS, takes=_OPTIONS_OF,
        ),
        System(
            "accelerate", "Accelerate", "", accelerate.read, accelerate.write, accelerate.settings_of, _DEEPSPEED_HAS,
            "fsdp-2024", signs=accelerate.SIGNS, takes=_OPTIONS_OF,
        ),
        *(
            System(
                program.system, program.title, "", program.read, program.write, program.settings_of, _DEEPSPEED_HAS,
                "fsdp-2024", signs=program.signs,
            )
            for program in (trainer_files.AXOLOTL, trainer_files.LLAMA_FACTORY)
        ),
        System(
            "nanotron", "nanotron", "", nanotron.read, nanotron.write, nanotron.settings_of, _NANOTRON_HAS,
            "megatron-core", signs=nanotron.SIGNS,
        ),
    )
}  # fmt: skip
SOURCES: dict[str, SourceSystem] = SYSTEMS | {
    source.name: source
    for source in (
        SourceSystem("trl", "TRL", "", trainer_files.TRL.read, signs=trainer_files.TRL.signs),
        SourceSystem("flagscale", "FlagScale", "", flagscale.read, signs=flagscale.SIGNS),
        SourceSystem("lightning", "Lightning", "", lightning.read, signs=lightning.SIGNS),
        SourceSystem("gpt-neox", "GPT-NeoX", "", gpt_neox.read, signs=gpt_neox.SIGNS),
        SourceSystem(
            "megatron-bridge",
            "Megatron-Bridge",
            "",
            megatron_bridge.read,
            variables=(megatron_bridge.CONFIG,),
            signs=megatron_bridge.SIGNS,
        ),
        SourceSystem("ms-swift", "ms-swift", "", ms_swift.read, signs=ms_swift.SIGNS),
        SourceSystem("picotron", "picotron", "", picotron.read, signs=picotron.SIGNS),
    )
}


def systems_by_signs() -> list[tuple[SourceSystem, FileSigns]]:
    """All systems with their signs, first those that no other system has."""
    pairs = [(system, signs) for system in SOURCES.values() for signs in system.signs]
    return sorted(pairs, key=lambda pair: -pair[1].weight)


def system_of_keys(data: Mapping[str, Any], suffix: str) -> SourceSystem | UnreadSystem | None:
    """The system whose configurations have such keys in files with a suffix; None if none is known."""
    unread = next((system for system in UNREAD_SYSTEMS if system.signs.fit_keys(data, suffix)), None)
    return unread or next((system for system, signs in systems_by_signs() if signs.fit_keys(data, suffix)), None)


def system_of(name: str, files: Iterable[str]) -> SourceSystem:
    """The system of a name, in the release that the suffix of the files belongs to."""
    system = SOURCES[name]
    suffixes = {PurePath(file).suffix.lower() for file in files}
    return SYSTEMS[system.others[suffixes.pop()]] if len(suffixes) == 1 and suffixes <= system.others.keys() else system


def read_job_of(system: SourceSystem, paths: tuple[str, ...], asked: Asked) -> Imported:
    """The job that the files of a system describe. PlanError lists every fault."""
    subject = f"{system.title}, {' '.join(paths)}"
    if len(paths) > _MOST_FILES:
        fault = say(
            "{count} files; name at most {most}, the one that starts training first",
            count=len(paths),
            most=_MOST_FILES,
        )
        raise PlanError(subject, [fault])
    texts: dict[str, str] = {}
    faults = []
    for path in paths:
        try:
            texts[path] = text_of(Path(path))
        except (FileFault, OSError) as error:
            faults.append(_unreadable(error))
    if faults:
        raise PlanError(subject, faults)
    first = Path(paths[0])
    try:
        engines, models = engine_texts(first, texts), model_texts(first, texts)
        library = library_texts(system.library, first, texts)
    except (FileFault, OSError) as error:
        raise PlanError(subject, [say("{fault} (the files name it)", fault=_unreadable(error))]) from None
    job = job_of_texts(system, texts | engines | models | library, asked, subject)
    notes = [say("the model is {path}, which the files name", path=path) for path in models]
    notes += [say("{path} is read, which the files name", path=path) for path in engines]
    return replace(job, assumed=(*notes, *job.assumed))


def _unreadable(error: FileFault | OSError) -> str:
    """A fault of a file that can't be read."""
    if isinstance(error, FileFault):
        return error_text(error)
    return say("{path} can't be read: {reason}; check the path", path=str(error.filename), reason=system_reason(error))


def job_of_texts(system: SourceSystem, texts: Mapping[str, str], asked: Asked, subject: str) -> Imported:
    """The job that texts describe; `texts` maps file names to texts. PlanError lists every fault."""
    system, asked = system_of(system.name, texts), asked.without_left_out()
    unknown = [name for name in asked.variables if name not in system.variables and _is_unknown(name, texts)]
    if faults := [_unknown_variable(name, texts) for name in unknown]:
        raise PlanError(subject, faults)
    try:
        _refuse_other_systems(system, texts)
        result = system.read(texts, asked)
    except (ShellFault, RecursionError) as error:
        raise PlanError(subject, [with_changed_texts(error_text(error), printable)]) from None
    result.settings.note(say("what nothing says has {system}'s own default", system=system.title))
    first = next(iter(texts))
    return imported(result, asked, subject, _name_of(first), Path(first).parent)


def _refuse_other_systems(system: SourceSystem, texts: Mapping[str, str]) -> None:
    """Raise ShellFault if one of the texts is a configuration of a system whose files this one does not take."""
    for name, text in texts.items():
        suffix = PurePath(name).suffix.lower()
        if system.takes is None or suffix not in (".json", ".yaml", ".yml", ".toml"):
            continue
        data = read_data(name, text)
        other = system_of_keys(data, suffix)
        if other is None or (isinstance(other, SourceSystem) and not _is_foreign(system, other, data)):
            continue
        if isinstance(other, SourceSystem):
            way_out = say("read it by shardwright import {name}", name=other.name)
        else:
            way_out = say(
                "{system} is not read here, so say the same by a configuration of a system that is, or as a job",
                system=other.title,
            )
        raise ShellFault(
            say(
                "{file} is a configuration of {other} by its keys, and none of {system}; {way_out}",
                file=shortened(name, 80),
                other=other.title,
                system=system.title,
                way_out=way_out,
            )
        )


def _is_foreign(system: SourceSystem, other: SourceSystem, data: Mapping[str, Any]) -> bool:
    """True if a file is another system's by keys that no third one has, and that system's files are not taken."""
    is_known = any(signs.weight == OWN and signs.fit_keys(data) for signs in other.signs)
    return is_known and other.name != system.name and other.name not in (system.takes or ())


def _is_unknown(name: str, texts: Mapping[str, str]) -> bool:
    """True if a variable that is set occurs in no file. `_name_` stands for the output of a command or a function."""
    is_made = name.startswith("_") and name.endswith("_")
    return name.isidentifier() and not is_made and not any(re.search(rf"\b{name}\b", t) for t in texts.values())


def _unknown_variable(name: str, texts: Mapping[str, str]) -> str:
    names = {name for text in texts.values() for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text)}
    near = catalog.nearest(name, sorted(names), most=1)
    hint = say("a field of the job is named as section.field")
    if near:
        hint = say("did you mean {meant}?", meant=near[0])
    return say("--set {name}: nothing in the files is called so; {hint}", name=name, hint=hint)


def _name_of(path: str) -> str:
    """The name of the job: the file's name, reduced to letters, digits, and - _ ."""
    stem = Path(path).absolute().stem
    allowed = "".join(char if (char.isalnum() and char.isascii()) or char in "-_." else "-" for char in stem).strip(
        ".-"
    )
    return allowed[:100] or "job"
