"""Text about a job that was imported from another system's files, and about files that were exported for a system."""

from collections.abc import Iterator
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.interchange.exported import Exported, Lacking
from shardwright.interchange.imported import Imported
from shardwright.interchange.nearest import way_to
from shardwright.interchange.system import System
from shardwright.report.nearest_text import set_words
from shardwright.report.text_columns import filled
from shardwright.schedule.job_program import plan_faults

_SHOWN = 6  # names of settings on a subject


def imported_notes(result: Imported, with_data: bool = True) -> str:
    """Everything in which the job differs from the files, and everything that the files do not state."""
    of_data = result.of_data if with_data else ()
    sentences = (remark[:1].upper() + remark[1:] + "." for remark in of_data)
    return "\n".join([*_lines(result), *(filled(sentence) for sentence in sentences)])


def _lines(result: Imported) -> Iterator[str]:
    for heading, lines in (
        ("Assumed:", result.assumed),
        ("Said there, and not in the job:", result.lost),
        ("Not known here, and not in the job:", result.unknown),
    ):
        if lines:
            yield heading
            yield from (filled(line, "  ", "    ") for line in lines)
    if result.without_effect:
        yield "Not read, for it does not change the plan:"
        for subject, names in result.without_effect.items():
            ending = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = f"{subject}: {', '.join(names[:_SHOWN])}{ending}"
            yield filled(text, "  ", "    ")


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


def exported_notes(result: Exported, title: str) -> str:
    """Notes about the parts of the job that the files lack, and about settings in them that the job does not state; a
    line for each."""
    notes = []
    if result.left_out:
        notes.append(f"Left out, for {title} says it in its own way: {', '.join(result.left_out)}.")
    if result.unsaid_learning_rate is not None:
        notes.append(
            f"The job says no learning rate, and {result.unsaid_learning_rate:g} is in the files; say yours with "
            "--set optimizer.learning_rate=RATE."
        )
    if result.nodes > 1 and "run.sh" in result.files:
        notes.append(
            f"Start run.sh on each of the {result.nodes} nodes, with NODE_RANK (0 to {result.nodes - 1}) and "
            "MASTER_ADDR "
            "(the first node's address) in its environment."
        )
    elif result.nodes > 1:
        notes.append(f"It is for {result.nodes} nodes; how they start and find each other is your launcher's to say.")
    return "\n".join(filled(note) for note in notes)


def nearest_export(system: System, job: JobSpec, lack: Lacking) -> str:
    """The way out for a job that a system lacks: the nearest plan that it has. Empty if each fault has a way out of its
    own."""
    near = lack.nearest
    if near is None or plan_faults(near):
        is_named = any("can't be said to" in fault for fault in lack.faults)
        return f"no job near to it is known that {system.title} has; change these, or take another --to" * is_named
    return f"the nearest plan that {system.title} has: {set_words(way_to(job, near, plan_faults))}"
