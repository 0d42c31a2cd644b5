"""torchtitan's TOML, which its releases up to 0.2 read (2024 to early 2026)."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys, nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.toml_text import value_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.launcher import Launched, find_training_command, missing_ranks
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import System
from shardwright.interchange.systems.torchtitan_releases import IN_TOML, read_settings

SIGNS = (
    FileSigns(
        (("parallelism",), ("training",), ("activation_checkpoint",), ("job",)),
        commands=(r"--job\.config[_-]file\b",),
        suffixes=(".toml",),
    ),
)
_FILE = "job.config_file"
# Values of the plan for a search, where torchtitan has others that `write` does not say.
WRITTEN: Mapping[str, tuple[Any, ...]] = {
    "offload_activations": (False,),
    "recompute_operators": (["attention"], ["norm", "activation"]),
}


def is_training(words: list[str]) -> bool:
    """True if a command names a TOML file of torchtitan's."""
    return any(word.partition("=")[0].replace("-", "_") == f"__{_FILE}" for word in words)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a TOML file, or a script with those that it names, whose flags hold over theirs. Raises ShellFault."""
    scripts = {name: text for name, text in texts.items() if PurePath(name).suffix.lower() != ".toml"}
    command = find_training_command(scripts, asked, is_training) if scripts else Launched({}, {}, 0, 0)
    flags = {name.replace("-", "_"): value for name, value in command.settings.items()}
    flat: dict[str, Any] = {}
    for name, text in texts.items():
        flat |= {} if name in scripts else flat_keys(read_data(name, text))
    faults = [] if asked.cluster.devices else missing_ranks(command)
    named = PurePath(str(flags.pop(_FILE))).name if scripts else ""
    is_given = named in {PurePath(name).name for name in texts} or (unknown_names(named) and flat)
    if scripts and not is_given:
        path = shortened(readable(str(command.settings[_FILE.replace("_", "-")])))
        raise ShellFault(say("{file} has the options of the program, and is not read: name it too", file=path))
    settings = Settings(flat | flags, notes=list(command.notes), faults=faults, overrides=asked.fields)
    return read_settings(settings, IN_TOML, asked, command.nodes, command.devices_per_node)


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under torchtitan's keys."""
    return IN_TOML.settings(job)


def write(job: JobSpec) -> dict[str, str]:
    """The configuration of a job, by its file name."""
    lines = [
        f"# {' '.join(job.name.split())}, for torchtitan up to 0.2, written by shardwright.",
        f"# It takes {job.plan.world} GPUs.",
    ]
    for section, values in nested_keys(settings_of(job)).items():
        lines += ["", *_section(section, values)]
    return {"job.toml": "\n".join(lines) + "\n"}


def _section(name: str, values: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"[{name}]", *(f"{key} = {value_text(value)}" for key, value in plain.items())] if plain else []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [*([""] if lines else []), *_section(f"{name}.{key}", value)]
    return lines


FACTS = System(
    name="torchtitan-0.2",
    place=50,
    title="torchtitan 0.2",
    read=read,
    write=write,
    settings=settings_of,
    software="torchtitan-2025",
    written=WRITTEN,
    signs=SIGNS,
    takes=(),
)
