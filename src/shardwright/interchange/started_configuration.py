"""Programs that a script starts with one configuration, or several: the command, and the files that it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from shardwright.config.base import shortened, shortened_path
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.launcher import Launched, find_training_command
from shardwright.interchange.left_out_files import left_out, left_out_note
from shardwright.interchange.reading.file_signs import FileSigns, is_configuration
from shardwright.interchange.reading.settings import Flat
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault

_AXES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Started:
    """The configurations by name, and the command that starts the program with them; no command without a script."""

    files: dict[str, str]
    command: Launched | None

    @property
    def ranks(self) -> int:
        """The number of ranks that the launcher starts; 0 if nothing says it."""
        return self.command.nodes * self.command.devices_per_node if self.command else 0

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes, and devices of each; 0 if nothing says them."""
        return (self.command.nodes, self.command.devices_per_node) if self.command and self.ranks else (0, 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions of the script."""
        return self.command.notes if self.command else ()


def started_configuration(texts: Mapping[str, str], asked: Asked, signs: Sequence[FileSigns]) -> Started:
    """The configurations among the texts, with the command of a script that starts the program of some signs. Raises
    ShellFault for a configuration that the command names and that is not there."""
    scripts = {name: text for name, text in texts.items() if not is_configuration(name)}
    files = {name: text for name, text in texts.items() if name not in scripts}
    if not scripts:
        return Started(files, None)
    command = find_training_command(scripts, asked, lambda words: any(sign.fit_words(words) for sign in signs), files)
    others = left_out(files, command, asked.rivals)
    command = replace(command, notes=(*command.notes, *map(left_out_note, others)))
    files = {name: text for name, text in files.items() if name not in others}
    files |= {path: text for path, text in command.written.items() if is_configuration(path)}
    names = {PurePath(name).name for name in files}
    named = [word.rpartition("=")[2] for word in command.arguments if is_configuration(word)]
    missing = [word for word in named if not unknown_names(word) and PurePath(word).name not in names]
    if missing:
        raise ShellFault(
            say(
                "{file} has the options of the program, and is not read: name it too",
                file=shortened_path(readable(missing[0])),
            )
        )
    if not files:
        option = shortened(readable(" ".join(command.arguments[:3]) or command.program), 60)
        raise ShellFault(
            say(
                "the script starts a program with a configuration ({option}), which is no file here: name it",
                option=option,
            )
        )
    return Started(files, command)


def ranks_faults(fields: Flat, asked: Asked, started: Started) -> list[str]:
    """Faults of ranks that the launcher or the user gives and that are not those of the degrees in a file."""
    ranks = 1
    for axis in _AXES:
        ranks *= fields[f"plan.{axis}"]
    degrees = " x ".join(f"{axis} {fields[f'plan.{axis}']}" for axis in _AXES)
    if "plan.dp" in asked.fields:
        return []
    if asked.cluster.devices:
        fault = say(
            "--devices {devices}: the file has {degrees} = {ranks} ranks; name {ranks}, or --set plan.dp=N",
            devices=asked.cluster.devices,
            degrees=degrees,
            ranks=ranks,
        )
        return [fault] if asked.cluster.devices != ranks else []
    if started.ranks in (0, ranks):
        return []
    fault = say(
        "the script starts {started} ranks, and the file has {degrees} = {ranks}; name the file of this script, or say "
        "--devices {ranks}",
        started=started.ranks,
        degrees=degrees,
        ranks=ranks,
    )
    return [fault]
