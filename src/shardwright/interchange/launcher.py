"""The training command of a launch script, and the nodes and devices that its launcher starts."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import each, say
from shardwright.interchange.imported import Asked
from shardwright.interchange.known_settings import subject_of
from shardwright.interchange.launched_ranks import (
    NODE_LAUNCHERS,
    LaunchedRanks,
    launched_ranks,
    launcher_words,
    variables_of_ranks,
    visible_devices,
    with_whole_options,
)
from shardwright.interchange.reading.file_signs import COMMENT, is_configuration
from shardwright.interchange.reading.loose_words import LooseWord, loose_words, without_unset_groups
from shardwright.interchange.reading.script_text import settings_of
from shardwright.interchange.reading.settings import plain_text
from shardwright.interchange.reading.shell_commands import Command
from shardwright.interchange.reading.shell_marks import UNKNOWN, readable, unknown_names
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.training_programs import trains_by_name, trains_nothing, without_evaluations


@dataclass(frozen=True)
class Launched:
    """A training command: the settings of its launcher and of its program, and how many nodes and devices per node it
    starts; 0 means unknown."""

    launcher_settings: dict[str, Any]
    settings: dict[str, Any]
    nodes: int
    devices_per_node: int
    launcher: str = ""  # what starts the program: torchrun, deepspeed, ...
    program: str = ""  # the file that trains, or its module
    arguments: tuple[str, ...] = ()  # words behind the program
    options_file: str = ""  # the configuration that stands first behind the program
    exported: Mapping[str, str] = field(default_factory=dict)  # variables of the script, without arrays
    written: dict[str, str] = field(default_factory=dict)  # files that the script writes, by name
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    loose: tuple[LooseWord, ...] = ()
    hosts: str = ""  # the option that lists the nodes, if no other option counts them
    named: frozenset[str] = frozenset()  # names of configurations that the command names
    of_others: frozenset[str] = frozenset()  # and those that earlier training commands alone name


def _followed(texts: Mapping[str, str], asked: Asked, present: Iterable[str]) -> Script:
    """The first of some scripts, followed, with the others to source or start."""
    first, *others = texts
    files = {PurePath(name).name: texts[name] for name in others}
    script = Script(Variables(dict(asked.variables), frozenset(asked.variables)), files)
    script.paths = {name: texts[name] for name in others}
    script.present = frozenset(PurePath(name).name for name in (*texts, *present))
    if asked.arguments:
        script.variables.set_arguments(asked.arguments)
    script.follow(texts[first])
    return script


def named_configurations(texts: Mapping[str, str], asked: Asked) -> list[str]:
    """The paths of the configurations that the commands of the first script name, the other scripts being there to
    source or start; none if it can't be followed."""
    try:
        commands = _followed(texts, asked, ()).commands
    except ShellFault:
        return []
    words = [word for command in commands for word in _words_of_configurations(command)]
    return [word for word in dict.fromkeys(words) if not unknown_names(word)]


def find_training_command(
    texts: Mapping[str, str],
    asked: Asked,
    is_training: Callable[[list[str]], bool],
    present: Iterable[str] = (),
) -> Launched:
    """The last training command that the first script runs; the other scripts may be sourced or started by it.

    Variables and arguments of the first script are the user's, `is_training` tells from its words if a command trains,
    and `present` are further files that are there. Raises ShellFault.
    """
    script = _followed(texts, asked, present)
    training_commands = [command for command in script.commands if is_training(command.words)]
    if not training_commands:
        known_reasons = _reasons_without_training(script)
        reasons = say(" ({reasons})", reasons=each(known_reasons)) if known_reasons else ""
        raise ShellFault(
            say(
                "no command in it trains a model here{reasons}; name the script with the training command first, and "
                "those that it sources or starts behind it",
                reasons=reasons,
            )
        )
    trains = [command for command in training_commands if not trains_nothing(_program_of(command.words))]
    training_commands = trains or training_commands
    places = without_evaluations([command.words for command in training_commands])
    training_commands = [training_commands[place] for place in places]
    last = training_commands[-1]
    _refuse_lost(last, script)
    _tell_options_behind(last, script)
    earlier = [command for command in training_commands if command.words != last.words]
    if earlier:
        script.notes.append(
            say(
                "it trains {count} times with other settings; what follows is of the last, on line {line} (others: "
                "{others})",
                count=len(earlier) + 1,
                line=last.line,
                others=tuple(str(command.line) for command in earlier[:5]),
            )
        )
    named = frozenset(_configurations(last))
    of_others = frozenset(name for command in earlier for name in _configurations(command)) - named
    launched = _with_environment(_of_command(last, script), texts.values())
    launched = replace(launched, named=named, of_others=of_others)
    sizes = _asked_sizes(launched, asked)
    if not sizes:
        return launched
    taken = say("{settings} by --devices", settings=tuple(f"{name}={value}" for name, value in sizes.items()))
    known = replace(asked, variables={**asked.variables, **sizes})
    again = find_training_command(texts, known, is_training, present)
    return replace(again, notes=(*again.notes, taken))


def _asked_sizes(launched: Launched, asked: Asked) -> dict[str, str]:
    """Values of the variables of a launcher's nodes and devices for as many devices as the user asks for, if words of
    the program depend on these, such as a batch of as many sequences as there are devices."""
    named = {name for word in launched.arguments for name in unknown_names(word)}
    if not named & {*launched.missing}:
        return {}
    sizes = variables_of_ranks(launched.launcher_settings, asked.cluster.devices, asked.cluster.devices_per_node)
    return sizes if named & sizes.keys() and not sizes.keys() & asked.variables.keys() else {}


def _refuse_lost(command: Command, script: Script) -> None:
    """Raise ShellFault if a command names a configuration that the script changes in a way that is not followed."""
    for word in command.words:
        name = PurePath(word.rpartition("=")[2]).name
        if name in script.lost:
            raise ShellFault(
                say(
                    "line {line} changes {file}, which the training command names, and is not followed; name the file "
                    "as it is then, in a script without that line",
                    line=script.lost[name],
                    file=shortened(readable(name)),
                )
            )


def _with_environment(command: Launched, texts: Iterable[str]) -> Launched:
    """A command of a tool that takes its nodes from the environment, with that variable among the missing ones if the
    scripts use it and none sets it: one node would be a guess."""
    is_asked = PurePath(command.program).name in _TOOLS_BY_ENVIRONMENT and NODES not in command.exported
    if not is_asked or command.nodes or not any(_USE_OF_NODES.search(COMMENT.sub("", text)) for text in texts):
        return command
    return replace(command, missing=tuple(dict.fromkeys([*command.missing, NODES])))


def nodes_by_environment(command: Launched) -> int:
    """The nodes that a tool starts by its environment, one if nothing says more; 0 if that is not known."""
    return 0 if NODES in command.missing else whole(command.exported.get(NODES, "1")) or 0


def _reasons_without_training(script: Script) -> list[str]:
    """The first reasons why no command of a script is known to train: scripts that it starts and that are not there,
    variables that would tell, programs that are not known, what is not followed."""
    scripts, programs = list[str](), list[str]()
    for command in sorted(script.commands, key=lambda command: trains_by_name(_program_of(command.words))):
        started = next((word for word in _leading_words(command.words) if word.endswith(_SCRIPTS)), "")
        if started:
            scripts.append(
                say(
                    "line {line}: {command} is not read: name that file too",
                    line=command.line,
                    command=shortened(readable(started)),
                )
            )
        elif name := _program_of(command.words):
            programs.append(
                say(
                    "line {line}: {program} is a program whose options are not known here",
                    line=command.line,
                    program=shortened(readable(name)),
                )
            )
    asked = [note for note in script.notes if "--set" in note]
    others = [note for note in script.notes if note not in asked]
    if script.ended_on and not (scripts or asked or programs):
        programs.insert(
            0, say("line {line}: the script ends there; its arguments stand behind --", line=script.ended_on)
        )
    named = [*scripts[:2], *asked[:2], *programs[-2:]]
    named = named or _started_otherwise(script, *((*NODE_LAUNCHERS, *_RANK_LAUNCHERS) if others else ()))
    if not (named or others) and any(name.isdigit() for name in script.variables.defaulted):
        named = [say("nobody gave the script its arguments, which stand behind --")]
    return list(dict.fromkeys([*named, *others]))[:3]


def _started_otherwise(script: Script, *launchers: str) -> list[str]:
    """The last command that a launcher starts, or any, where no script and no program is a reason; with `launchers` one
    that they start alone."""
    commands = [command for command in script.commands if not command.words[0].startswith("-")]
    if launchers:
        commands = [command for command in commands if _name_of(command.words[0]) in launchers]
    if not commands:
        return []
    launched = [command for command in commands if set(map(_name_of, command.words)) & {*NODE_LAUNCHERS}]
    command = (launched or commands)[-1]
    program = shortened(readable(" ".join(command.words)))
    return [
        say("line {line}: {program} is a program whose options are not known here", line=command.line, program=program)
    ]


def _name_of(word: str) -> str:
    return PurePath(word).name


def _leading_words(words: Sequence[str]) -> list[str]:
    """The words of a command that may name a script: the first ones, and those behind a shell."""
    return [*words[:8], *(after for word, after in pairwise(words) if PurePath(word).name in ("bash", "sh"))]


def _program_of(words: Sequence[str]) -> str:
    """The program in Python that a command starts, a file or a module; empty if it starts none."""
    names = [PurePath(word).name for word in words]
    starts = any(name.startswith("python") or name in (*NODE_LAUNCHERS, "srun", "mpirun", "mpiexec") for name in names)
    file = next((word for word in words if word.endswith(".py")), "")
    module = next((after for word, after in pairwise(words) if word in ("-m", "--module")), "")
    is_launcher = module.startswith(("torch.distributed", "accelerate.", "deepspeed.launcher"))
    return file or (module if starts and not is_launcher else "")


def _tell_options_behind(command: Command, script: Script) -> None:
    """Note options that a comment or a missing backslash parts from the training command. Raises ShellFault if one of
    them could have an effect."""
    for other in script.commands:
        if other.line <= command.line or not (other.words[0].startswith("--") and other.words[0][2:3].isalpha()):
            continue
        text = say(
            "line {line}: {option} begins a command of its own, since the line before it is a comment or lacks its \\",
            line=other.line,
            option=shortened(other.words[0], 60),
        )
        names = settings_of(other.words)
        if not all(subject_of("megatron", name) or subject_of("options", f"--{name}") for name in names):
            raise ShellFault(say("{fault}; mend it", fault=text))
        script.notes.append(text)


def missing_ranks(command: Launched) -> list[str]:
    """A list with one fault if the number of devices depends on variables or files that are not read, or none."""
    if command.hosts and not command.missing:
        value = command.launcher_settings.get(command.hosts)  # None if it stands before the launcher of a node
        option = f"--{command.hosts} {shortened(plain_text(value or ''), 40)}".strip()
        return [
            say(
                "{option} says which nodes there are, and is not read; say how many GPUs there are with --devices",
                option=option,
            )
        ]
    if not command.missing:
        return []
    ways = " ".join(f"--set {shlex.quote(name)}=VALUE" for name in command.missing)
    return [
        say("how many GPUs there are depends on the environment; say it with {ways}, or with --devices N", ways=ways)
    ]


def _configurations(command: Command) -> list[str]:
    """The names of the configurations that the words of a command name."""
    return [PurePath(word).name for word in _words_of_configurations(command)]


def _words_of_configurations(command: Command) -> list[str]:
    words = [word.rpartition("=")[2] for word in (*command.launchers, *command.words)]
    return [word for word in words if is_configuration(word)]


def _of_command(command: Command, script: Script) -> Launched:
    words = [word for word in command.words if word]
    program_index = next((i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), -1)
    end = max(program_index, 0)
    if program_index < 0:
        modules = [i for i, word in enumerate(words[:-1]) if word in ("-m", "--module")]
        program_index = (modules or [_unknown_program(words) - 1])[0] + 1
        end = max(program_index - 1, 0)
        if not modules and (tool := _place_of_tool(words)):
            program_index = end = tool
    is_unknown = not program_index and not words[0].endswith(".py") and bool(unknown_names(words[0]))
    launchers = with_whole_options([*command.launchers, *words[:end]])
    ranks = launched_ranks(launchers, script.batch)
    visible = visible_devices(command.variables.get("CUDA_VISIBLE_DEVICES", ""))
    is_local = not (ranks.nodes or ranks.devices_per_node or ranks.missing or ranks.hosts)
    launcher = PurePath((launcher_words(launchers) or [""])[0]).name
    if is_local and visible == 1 and launcher not in NODE_LAUNCHERS:
        one_note = say("one device is taken, the one of CUDA_VISIBLE_DEVICES (--devices N for others)")
        ranks = LaunchedRanks(1, 1, notes=(one_note,))
    if is_local and launcher.startswith("python") and command.variables.get("WORLD_SIZE") == "1":
        world_note = say("one device is taken, by WORLD_SIZE=1 (--devices N for others)")
        ranks = LaunchedRanks(1, 1, notes=(world_note,))
    if is_local and visible and launcher == "deepspeed":
        visible_note = say("the {count} devices of CUDA_VISIBLE_DEVICES are taken, as the launcher does", count=visible)
        ranks = LaunchedRanks(1, visible, notes=(visible_note,))
    missing = [*ranks.missing, *(unknown_names(words[0]) if is_unknown else ())]  # a launcher with its program
    is_made = script.variables.is_made
    if not (ranks.nodes and ranks.devices_per_node):  # unknown words of the launcher may give them
        loose = [name for word in loose_words(_without_places(launchers), is_made) if word.place for name in word.names]
        missing += [name for name in loose if not name.upper().endswith(_RENDEZVOUS_WORDS)]
    notes = [*script.notes, *ranks.notes]
    taken = [
        f"{name}={shortened(value, 30)}"
        for name, value in script.variables.defaulted.items()
        if _could_be_size(name, value) and name not in script.variables.fixed
    ]
    if taken:
        notes.append(say("nobody set these, so their defaults hold: {names}", names=tuple(taken[:12])))
    set_names = script.variables.values.keys()
    arguments, emptied = without_unset_groups(words[program_index + 1 :], set_names, script.commented)
    notes += emptied
    return Launched(
        settings_of(launcher_words(launchers)), settings_of(_as_options(arguments)),
        ranks.nodes, ranks.devices_per_node,
        launcher=PurePath((launcher_words(launchers) or [""])[0]).name,
        program=words[program_index] if program_index >= 0 else "", arguments=tuple(arguments),
        options_file=next((word for word in map(_file_of, arguments[:1]) if is_configuration(word)), ""),
        exported=command.variables, written=dict(script.written), notes=tuple(notes),
        missing=tuple(dict.fromkeys(missing)), loose=loose_words(arguments, is_made), hosts=ranks.hosts,
    )  # fmt: skip


def _as_options(words: Sequence[str]) -> list[str]:
    """The words behind a program, with those of Hydra's as options: model.layers=48 is --model.layers=48."""
    return [
        f"--{word.lstrip('+')}" if _HYDRA_WORD.match(word) and not _takes_value(previous) else word
        for previous, word in zip(["", *words], words, strict=False)
    ]


def _takes_value(word: str) -> bool:
    return word.startswith("--") and "=" not in word


def _unknown_program(words: Sequence[str]) -> int:
    """The place of a program that a variable names, behind a launcher's options; 0 if there is none."""
    is_launcher = bool(words) and PurePath(words[0]).name in NODE_LAUNCHERS
    for place in range(1, len(words) if is_launcher else 0):
        is_value = words[place - 1].startswith("-") and "=" not in words[place - 1]
        if not is_value and not UNKNOWN.sub("", words[place]):
            return place
    return 0


_HYDRA_WORD = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]{0,200}=")
_TOOLS_BY_ENVIRONMENT = ("llamafactory-cli", "llamafactory.cli", "swift", "megatron")
NODES = "NNODES"  # the variable with the number of nodes, as they and torchrun's examples have it
_USE_OF_NODES = re.compile(rf"(?<!\\)\$\{{?{NODES}\b(?!:?[-=+?])")  # without a default
_TOOLS = ("llamafactory-cli", "swift", "megatron", "axolotl", "trl")  # programs that other launchers may start
_OF_PLACES = ("-w", "-x", "-J", "-p", "-A", "-o", "-e", "-t")  # options of srun with a value that counts nothing
_TASKS = ("train", "sft", "pt", "pretrain")


def _without_places(words: Sequence[str]) -> list[str]:
    """The words of launchers without those that say where, when and for whom srun starts them."""
    return [word for previous, word in zip(["", *words], words, strict=False) if previous not in _OF_PLACES]


def _file_of(word: str) -> str:
    """The file that an argument names, alone or behind Hydra's --config-name=."""
    return word.removeprefix("--config-name=")


def _place_of_tool(words: Sequence[str]) -> int:
    """The place of a tool with a task behind it, such as swift sft; 0 if none is behind the first word."""
    pairs = enumerate(pairwise(words))
    return next((i for i, (word, task) in pairs if PurePath(word).name in _TOOLS and task in _TASKS), 0)


_RANK_LAUNCHERS = ("srun", "mpirun", "mpiexec", "jsrun")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_RENDEZVOUS_WORDS = ("PORT", "RANK", "CUDA", "NCCL", "NVTE", "TIMEOUT")


def _could_be_size(name: str, value: str) -> bool:
    """True if the default of a variable could be a degree or a size."""
    return not any(word in name for word in _RENDEZVOUS_WORDS) and whole(value.replace(".", "", 1)) is not None
