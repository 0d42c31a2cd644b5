"""Configurations that options of a program or its launcher name, and that are none of the files."""

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.setting_notes import unread_files
from shardwright.interchange.reading.shell_marks import unknown_names

# Options of transformers' TrainingArguments by which a file or a command is one of these.
OF_OPTIONS = ("per_device_train_batch_size", "learning_rate", "model_name_or_path", "output_dir", "num_train_epochs")
_FILES = (
    *("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "deepspeed_config.deepspeed_config_file"),
    "deepspeed_config_file",
    *("--ds_config_path", "--config_file", "--config", "--train_config", "--fsdp_config"),
)


def _missing_files(given: Mapping[str, Any], names: Set[str], has_own: bool) -> Iterator[str]:
    """Each configuration that a script or another file names and that is not among the files."""
    for key in _FILES:
        value = given.get(key)
        if not isinstance(value, str) or value in ("none", "") or value.lstrip().startswith("{"):
            continue
        is_given = PurePath(value).name in names  # the folder may be unknown
        if not is_given and not (has_own and unknown_names(value)):
            yield f"{key} {shortened(value)}"


_CONFIGURATIONS = ("config_file", "config", "train_config")


def _own_configuration(command: Launched | None, given: Mapping[str, Any], missing: Sequence[str]) -> str:
    """The setting of `missing` by which a program, and no launcher, names a configuration that says its options: none
    of them stands in the command. Empty if there is none."""
    if command is None or any(f"--{name}" in given for name in OF_OPTIONS):
        return ""
    names = [name for name in command.settings if name.replace("-", "_") in _CONFIGURATIONS]
    options = [f"--{name.replace('-', '_')} " for name in names]
    return next((setting for setting in missing if setting.startswith(tuple(options))), "") if options else ""


def configurations_missing(
    command: Launched | None, given: Mapping[str, Any], names: Set[str], has_own: bool, overrides: Container[str]
) -> tuple[list[str], list[str]]:
    """(faults, notes) of the configurations that the options `given` name and that are not among the files of some
    names. `has_own` tells that a file of the system's is there, `overrides` are the fields that --set gives."""
    missing = [*_missing_files(given, names, has_own)]
    program_file = _own_configuration(command, given, missing)
    faults, notes = unread_files([setting for setting in missing if setting != program_file], overrides)
    if program_file:
        file = program_file.partition(" ")[2]
        faults.append(say("{file} has the options of the program, and is not read: name it too", file=file))
    return faults, notes
