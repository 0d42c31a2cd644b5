"""Read the files of another system as a job: what they are, the files that they name, and faults in one list."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError, error_text, printable, shortened
from shardwright.config.phrase import say, with_changed_texts
from shardwright.config.user_file import FileFault, system_reason
from shardwright.interchange.imported import Asked, Imported, imported
from shardwright.interchange.launcher import named_configurations
from shardwright.interchange.left_out_files import left_out_note
from shardwright.interchange.named_files import (
    argument_texts,
    base_texts,
    engine_texts,
    folder_texts,
    library_texts,
    model_texts,
    rival_texts,
    template_texts,
    text_of,
)
from shardwright.interchange.named_modules import module_texts
from shardwright.interchange.named_scripts import script_texts
from shardwright.interchange.reading.file_signs import OWN, is_configuration
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.recognised import USUAL_PYTHON
from shardwright.interchange.system import SourceSystem, system_of, system_of_keys
from shardwright.interchange.training_programs import TRAINS, told_by_path
from shardwright.interchange.wrapped_commands import with_scripts

_MOST_FILES = 16


def _python_faults(system: SourceSystem, paths: tuple[str, ...]) -> list[str]:
    """The fault of a program in Python that stands alone, of a system that is not read from such; none for others."""
    is_read = system.name == USUAL_PYTHON or any(signs.imports for signs in system.signs)
    if is_read or len(paths) > 1 or PurePath(paths[0]).suffix.lower() != ".py":
        return []
    return [
        say(
            "{file} is a program in Python, and {system} is read from other files; name its configuration, or the "
            "script that starts it with its options",
            file=PurePath(paths[0]).name,
            system=system.title,
        )
    ]


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
    if faults or (faults := _python_faults(system, paths)):
        raise PlanError(subject, faults)
    try:
        texts, held = with_scripts(texts)
    except ShellFault as error:
        raise PlanError(subject, [error_text(error)]) from None
    first = Path(next(iter(texts)))
    try:
        scripts = script_texts(first, texts)
        engines = argument_texts(first, asked.arguments, texts | scripts)
        engines |= engine_texts(first, texts | scripts | engines)
        models = model_texts(first, texts | scripts)
        rivals = {name for name in engines if not _is_named_in(name, texts | scripts)}  # other files name them
        if system.leaves_out and not is_configuration(str(first)):
            plain = {name: text for name, text in (texts | scripts).items() if not is_configuration(name)}
            named = named_configurations(plain, asked.without_left_out())
            others = rival_texts(first, texts | scripts | engines, named)
            engines, rivals = engines | others, rivals | {*others}
        asked = replace(asked, rivals=frozenset(rivals))
        engines |= folder_texts(first, texts | scripts | engines)
        engines |= template_texts(first, texts | engines) if system.has_templates else {}
        bases = base_texts(first, texts)
        library = library_texts(system.library, first, texts)
        modules = module_texts(system, first, texts | scripts | engines, asked)
    except ShellFault as error:
        raise PlanError(subject, [error_text(error)]) from None
    except (FileFault, OSError) as error:
        raise PlanError(subject, [say("{fault} (the files name it)", fault=_unreadable(error))]) from None
    held_texts = scripts | engines | models | bases | library | modules
    job = job_of_texts(system, texts | held_texts, asked, subject)
    notes = [*held]
    notes += [say("the model is {path}, which the files name", path=path) for path in models]
    read = [path for path in (*scripts, *engines, *bases, *modules) if left_out_note(path) not in job.assumed]
    notes += [say("{path} is read, which the files name", path=path) for path in read]
    return replace(job, assumed=(*notes, *job.assumed))


def _is_named_in(path: str, texts: Mapping[str, str]) -> bool:
    """True if a script among the texts has the name of a file."""
    scripts = [text for name, text in texts.items() if not is_configuration(name)]
    return not scripts or any(PurePath(path).name in text for text in scripts)


def _unreadable(error: FileFault | OSError) -> str:
    """A fault of a file that can't be read."""
    if isinstance(error, FileFault):
        return error_text(error)
    return say("{path} can't be read: {reason}; check the path", path=str(error.filename), reason=system_reason(error))


def job_of_texts(system: SourceSystem, texts: Mapping[str, str], asked: Asked, subject: str) -> Imported:
    """The job that texts describe; `texts` maps file names to texts. PlanError lists every fault."""
    system, asked = system_of(system.name, texts), asked.without_left_out()
    known = (*system.variables, TRAINS)
    unknown = [name for name in asked.variables if name not in known and _is_unknown(name, texts)]
    if faults := [_unknown_variable(name, texts) for name in unknown]:
        raise PlanError(subject, faults)
    try:
        _refuse_other_systems(system, texts)
        result = system.read(texts, asked)
    except (ShellFault, RecursionError) as error:
        raise PlanError(subject, [with_changed_texts(error_text(error), printable)]) from None
    result.settings.note(say("what nothing says has {system}'s own default", system=system.title))
    first = next(iter(texts))
    kinds = told_by_path(first) if is_configuration(first) else []
    result.settings.lost += [line for line in kinds if line not in result.settings.lost]
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
            way_out = say("use shardwright import {name} to read it", name=other.name)
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
