"""Commands that start a program over transformers' Trainer with its YAML: llamafactory-cli, axolotl, trl."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened_path
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.hydra_command import overridden
from shardwright.interchange.imported import Asked
from shardwright.interchange.launched_ranks import launched_ranks
from shardwright.interchange.launcher import Launched, find_training_command, nodes_by_environment
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.training_programs import program_fault

_YAML = (".yaml", ".yml")
_OF_OPTIONS = (".json", *_YAML)
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_OF_PYTHON = ("pip", "venv", "virtualenv", "ensurepip")  # modules that install, such as deepspeed
# Names of programs that train by options in a JSON, which no launcher need start.
TRAINER = r"(?:[a-z]{0,20}train|[a-z]{0,20}tune|sft|pt|cpt|clm|run_clm)(?:_\w{0,60})?\.py"
_TRAINER = re.compile(rf"(?:^|/){TRAINER}$")
_OF_COMMAND = ("config", "launcher", "num-processes", "num-machines", "main-process-port", "machine-rank")


def is_training(words: list[str]) -> bool:
    """True if a command starts training with DeepSpeed, with Accelerate, or with options of TrainingArguments, which
    may stand in a file behind the program."""
    if any(one == "-m" and two in _OF_PYTHON for one, two in pairwise(words)):
        return False
    is_launched = any(word.rpartition("/")[2] in _LAUNCHERS for word in words)
    pairs = [(one, two) for one, two in pairwise(words) if one.endswith(".py") and two.endswith(_OF_OPTIONS)]
    if any(is_launched or (two.endswith(".json") and _TRAINER.search(one)) for one, two in pairs):
        return True
    names = {word.partition("=")[0].replace("-", "_").strip("_") for word in words}
    is_unknown = bool(unknown_names(words[0]))  # a launcher with its program
    has_program = is_unknown or any(word.endswith(".py") or word in ("-m", "--module") for word in words)
    of_training = names & {
        "deepspeed",
        "deepspeed_config",
        "per_device_train_batch_size",
        "config_file",
        "learning_rate",
    }
    if names & {"micro_batch_size", "micro_train_batch_size"}:  # of alpaca-lora's program
        of_training |= names & {"cutoff_len", "lora_target_modules"}
    if "per_device_train_batch_size" in names and not words[0].startswith("-"):  # a command of its own: tool sft --...
        has_program = True
    return has_program and (bool(of_training) or words[0].rpartition("/")[2] in ("deepspeed", "accelerate"))


def trainer_command(
    scripts: Mapping[str, str], asked: Asked, files: Mapping[str, Any], signs: Sequence[FileSigns]
) -> Launched:
    """The command of a script that starts a program with some signs, with its nodes and devices. `files` are the other
    files by name; a YAML that the command names has to be among them. Raises ShellFault."""
    command = find_training_command(scripts, asked, lambda words: any(sign.fit_words(words) for sign in signs), files)
    task = command.arguments[0] if command.arguments else ""
    if fault := program_fault(task, asked.variables) if task.isidentifier() else "":
        raise ShellFault(fault)
    names = {PurePath(name).name for name in (*files, *command.written)}
    for word in command.arguments:
        if word.lower().endswith(_YAML) and PurePath(word).name not in names:
            raise ShellFault(
                say(
                    "{file} has the options of the program, and is not read: name it too",
                    file=shortened_path(readable(word)),
                )
            )
    if command.nodes * command.devices_per_node:
        return command
    nodes, devices = _sizes(command)
    return replace(command, nodes=nodes, devices_per_node=devices)


def with_options(options: Mapping[str, Any], command: Launched) -> dict[str, Any]:
    """Options of a YAML with those of the command in their place: --name value, or name=value."""
    own = {name: value for name, value in command.settings.items() if name and name not in _OF_COMMAND}
    words = [f"{name.replace('-', '_')}={value}" for name, value in own.items() if not isinstance(value, list)]
    words += [word for word in command.arguments if "=" in word and not word.startswith("-")]
    lists = {name.replace("-", "_"): value for name, value in own.items() if isinstance(value, list)}
    return overridden(options, words) | lists


def _sizes(command: Launched) -> tuple[int, int]:
    """Nodes, and devices of each, by options and variables that the programs read; 0 where none says them."""
    behind = list(command.arguments)
    ranks = launched_ranks(["torchrun", *behind[behind.index("--") + 1 :]] if "--" in behind else [], {})
    if ranks.nodes * ranks.devices_per_node:
        return ranks.nodes, ranks.devices_per_node
    given = {**command.settings, **command.launcher_settings}
    processes, machines = (whole(str(given.get(name, ""))) or 0 for name in ("num-processes", "num-machines"))
    if processes:
        return (machines or 1, processes // (machines or 1)) if processes % (machines or 1) == 0 else (0, 0)
    visible = [word for word in command.exported.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip().isdigit()]
    devices = whole(command.exported.get("NPROC_PER_NODE", "")) or len(visible)
    return nodes_by_environment(command) if devices else 0, devices
