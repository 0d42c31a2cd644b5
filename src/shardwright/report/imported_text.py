"""Text about a job that was imported from another system's files, and about files that were exported for a system."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, capitalized, say
from shardwright.interchange.exported import Exported, Lacking
from shardwright.interchange.imported import Imported
from shardwright.interchange.nearest import way_to
from shardwright.interchange.system import System
from shardwright.report.document import Paragraph, Part, paragraph, part_text
from shardwright.report.nearest_text import set_words
from shardwright.schedule.job_program import plan_faults

_SHOWN = 6  # names of settings on a subject


@dataclass(frozen=True)
class NoteGroup:
    """Notes on an import below one heading. Those that are not `of_effect` change nothing of a plan."""

    heading: str
    lines: tuple[str, ...]
    of_effect: bool = True


def note_groups(result: Imported) -> Iterator[NoteGroup]:
    """Everything in which a job differs from its files, and everything that these do not state, by heading."""
    for heading, lines in (
        (say("Assumed:"), result.assumed),
        (say("Said there, and not in the job:"), result.lost),
        (say("Not known here, and not in the job:"), result.unknown),
    ):
        if lines:
            yield NoteGroup(heading, tuple(lines))
    if result.without_effect:
        subjects = tuple(_on_subject(topic, names) for topic, names in result.without_effect.items())
        yield NoteGroup(say("Not read, for it does not change the plan:"), subjects, of_effect=False)


def _on_subject(topic: str, names: tuple[str, ...]) -> str:
    listed = say("{listed}", listed=names[:_SHOWN])
    if len(names) > _SHOWN:
        listed = say("{listed} and {count} more", listed=listed, count=len(names) - _SHOWN)
    return say("{subject}: {fault}", subject=topic, fault=listed)


def imported_notes(result: Imported, with_data: bool = True, language: str = ENGLISH) -> str:
    """Everything in which the job differs from the files, and everything that the files do not state, in a language."""
    of_data = [say("{does}.", does=capitalized(remark)) for remark in result.of_data if with_data]
    return "\n".join(part_text(part, language) for part in (*_parts(result), *map(paragraph, of_data)))


def _parts(result: Imported) -> Iterator[Part]:
    for group in note_groups(result):
        yield group.heading
        yield from map(_item, group.lines)


def _item(text: str) -> Paragraph:
    """A text below a heading."""
    return Paragraph((text,), "  ", "    ")


def imported_dict(result: Imported) -> dict[str, Any]:
    """An imported job for `--json`."""
    return {
        "job": result.job.model_dump(exclude_defaults=True, mode="json"),
        "assumed": list(result.assumed),
        "lost": list(result.lost),
        "unknown": list(result.unknown),
        "of_data": list(result.of_data),
        "without_effect": {subject: list(names) for subject, names in result.without_effect.items()},
    }


def exported_notes(result: Exported, system: System, language: str = ENGLISH) -> str:
    """Notes about exported files of a system, a line for each, in a language."""
    return "\n".join(paragraph(note).text(language) for note in exported_sentences(result, system))


def exported_sentences(result: Exported, system: System) -> list[str]:
    """Notes about the parts of the job that the files of a system lack, and about settings in them that the job does
    not state."""
    notes: list[str] = []
    if result.left_out:
        notes.append(
            say(
                "Left out, for {system} says it in its own way: {fields}.",
                system=system.title,
                fields=result.left_out,
            )
        )
    if result.unsaid_learning_rate is not None:
        notes.append(
            say(
                "The job says no learning rate, and {rate:g} is in the files; say yours with --set "
                "optimizer.learning_rate=RATE.",
                rate=result.unsaid_learning_rate,
            )
        )
    if result.nodes > 1 and "run.sh" in result.files:
        notes.append(
            say(
                "Start run.sh on each of the {nodes} nodes, with NODE_RANK (0 to {last}) and MASTER_ADDR (the first "
                "node's address) in its environment.",
                nodes=result.nodes,
                last=result.nodes - 1,
            )
        )
    elif result.nodes > 1:
        notes.append(
            say(
                "It is for {nodes} nodes; how they start and find each other is your launcher's to say.",
                nodes=result.nodes,
            )
        )
    notes.append(_data_note(system))
    return notes


def _data_note(system: System) -> str:
    """A sentence on the data that written files name."""
    if system.run_files is None:
        return say("The data in the files stand for yours.")
    return say(
        "The data in the files stand for yours; `shardwright launch JOB --slurm --for {name}` writes a script with the "
        "job's own data and checkpoints.",
        name=system.name,
    )


def nearest_export(system: System, job: JobSpec, lack: Lacking) -> str:
    """The way out for a job that a system lacks: the nearest plan that it has. Empty if each fault has a way out of its
    own."""
    near = lack.nearest
    if near is None or plan_faults(near):
        if not any("can't be said to" in fault for fault in lack.faults):
            return ""
        return say(
            "no job near to it is known that {system} has; change these, or take another --to", system=system.title
        )
    options = set_words(way_to(job, near, plan_faults))
    return say("the nearest plan that {system} has: {options}", system=system.title, options=options)
