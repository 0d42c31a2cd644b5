"""The system whose file a text is, by its suffix and the signs that each system has."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text
from shardwright.config.hugging_face.config_json import ADAPTER, CONFIG
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.reading.hydra_defaults import named_bases
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SOURCES, SourceSystem, system_of_keys, systems_by_signs
from shardwright.interchange.unread_systems import UNREAD_SYSTEMS, UnreadSystem
from shardwright.interchange.wrapped_commands import unwrapped

AS_A_JOB = say(
    "say it as a job: shardwright estimate MODEL --devices N --device NAME --set plan.tp=N --set "
    "batch.global_batch_size=N, where MODEL is of the catalog or a config.json"
)
# Keys of a config.json that say what its model is.
_OF_MODELS = ("model_type", "architectures", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "peft_type")
JOB = "shardwright"  # a job of this package, or a model as transformers describes it
DATA = (".json", ".yaml", ".yml", ".toml")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_MEASURED = (".csv", ".err", ".jsonl", ".log", ".out", ".txt")  # endings of files with what a run has measured
_TEXTS = (".jsonl", ".txt")  # those of them that may be data, too
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CONFIGURED = re.compile(r"\bTrainer\.Config\b")  # what a configuration of the usual system in Python makes
_USUAL_SCRIPT, USUAL_PYTHON = "megatron", "torchtitan"  # systems of files without a sign


class UnknownSystem(PlanError):  # noqa: N818 (it names what is not known)
    """A file that no known system writes."""


def no_job_fault(path: str) -> str:
    """The fault of a file that is named as a job, and that no known system writes: a program of a user's own, a log."""
    suffix = PurePath(path).suffix.lower()
    if suffix == ".py":
        return say(
            "{path} is a program in Python, and no job; a module of your own is trained by `shardwright.shard` in such "
            "a program (docs/own-modules.md); if it is a transformer, {way}",
            path=path,
            way=AS_A_JOB,
        )
    if suffix in _MEASURED:
        fault = say(
            "{path} is no job; {way}, and `shardwright validate` compares a table of measured steps with predictions",
            path=path,
            way=AS_A_JOB,
        )
        if not path.lower().endswith(_TEXTS):
            return fault
        return say("{fault}; data to train on are named by --set data.path={path}", fault=fault, path=path)
    return say(
        "{path} is no job, which is a TOML file, a config.json or a name of the catalog; {way}",
        path=path,
        way=AS_A_JOB,
    )


def system_name_of(
    path: str, text: str, *scripts: str, configurations: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The name of the system, or `JOB`. `scripts` are further ones, whose signs count where the first has none, and
    `configurations` are texts by path, whose keys count where no script has a sign. Raises PlanError for a text that no
    system is known to write."""
    try:
        held = unwrapped(path, text)
    except ShellFault as error:
        raise PlanError(path, [error_text(error)]) from None
    if held is not None:
        try:
            return system_name_of(*held, *scripts, configurations=configurations)
        except PlanError as error:
            raise type(error)(path, error.faults) from None
    suffix = PurePath(path).suffix.lower()
    name = ""
    if suffix in DATA:
        name = _of_configuration(path, suffix, text)
    elif suffix == ".py":
        name = _of_python(path, text)
    elif text.startswith("#!") or suffix in SCRIPTS:
        name = _of_scripts(path, (text, *scripts), configurations)
    if not name:
        fault = say(
            "no system is known to write such a file; name the system before it, such as megatron, or {way}",
            way=AS_A_JOB,
        )
        raise UnknownSystem(path, [fault])
    return name


def _of_configuration(path: str, suffix: str, text: str) -> str:
    """The name of the system of a configuration; empty if none is known. Raises PlanError."""
    try:
        data = read_data(path, text)
    except ShellFault as error:
        raise PlanError(path, [error_text(error)]) from None
    if name := _of_data(path, suffix, data):
        return name
    if bases := named_bases(data):
        fault = say(
            "it begins from other files ({files}), by Hydra's defaults; name its system, such as nemo, and these files "
            "behind it",
            files=bases,
        )
        raise PlanError(path, [fault])
    return ""


def _of_python(path: str, text: str) -> str:
    """The name of the system of a file in Python; empty if none is known. Raises PlanError."""
    if unread := next((other for other in UNREAD_SYSTEMS if other.signs.fit_python(text)), None):
        fault = say(
            "it is not read here, being a program of {system} by what it imports; {way}",
            system=unread.title,
            way=AS_A_JOB,
        )
        raise PlanError(path, [fault])
    name = next((system.name for system, signs in systems_by_signs() if signs.fit_python(text)), "")
    return name or (USUAL_PYTHON if _CONFIGURED.search(text) else "")


def _of_scripts(path: str, scripts: tuple[str, ...], configurations: Mapping[str, str]) -> str:
    """The name of the system that scripts start, the first one first, or of configurations behind them. Raises
    PlanError for a system that is not read."""
    for script in scripts:
        if other := next((other for other in UNREAD_SYSTEMS if other.signs.fit_script(script)), None):
            if other.read_as and _has_python(SOURCES[other.read_as], configurations):
                return other.read_as
            fault = say("it starts {system}, which is not read here; {way}", system=other.title, way=AS_A_JOB)
            raise PlanError(path, [fault])
    for script in scripts:
        if name := next((system.name for system, signs in systems_by_signs() if signs.fit_script(script)), ""):
            return name
    names = (
        _of_data(other, PurePath(other).suffix.lower(), read_data(other, configurations[other]))
        for other in configurations
        if other.lower().endswith(DATA)
    )
    return next((name for name in names if _is_behind_scripts(name)), _USUAL_SCRIPT)


def _has_python(system: SourceSystem, texts: Mapping[str, str]) -> bool:
    """True if one of the texts, by path, is a file in Python of a system."""
    return any(signs.fit_python(text) for name, text in texts.items() if name.endswith(".py") for signs in system.signs)


def _of_data(path: str, suffix: str, data: Mapping[str, Any]) -> str:
    """The name of the system that keys belong to; empty if none is known. Raises PlanError for one that is not read."""
    system = system_of_keys(data, suffix)
    if system is None:
        return JOB if suffix in (".toml", ".json") and _is_own(path, data) else ""
    if isinstance(system, SourceSystem):
        return system.name
    raise PlanError(path, [_unread(system)])


def _is_own(path: str, data: Mapping[str, Any]) -> bool:
    """True if a file may be a job of this package, maybe with misspelt sections, or describes a model."""
    if path.lower().endswith(".json"):
        return PurePath(path).name in (CONFIG, ADAPTER) or any(name in data for name in _OF_MODELS)
    known = sorted(JobSpec.model_fields)
    sections = [str(key) for key, value in data.items() if isinstance(value, dict)]
    return (
        not data or any(key in known for key in data) or any(catalog.nearest(name, known, most=1) for name in sections)
    )


def _is_behind_scripts(name: str) -> bool:
    return name in SOURCES and SOURCES[name].is_behind_scripts


def _unread(system: UnreadSystem) -> str:
    """The fault of a configuration of a system that is not read."""
    return say(
        "it is a configuration of {system} by its keys, which is not read here; {way}",
        system=system.title,
        way=AS_A_JOB,
    )
