"""What is told of a job that was made of another system's files, and of one that was written for it."""

import textwrap
from collections.abc import Iterator
from typing import Any

from shardwright.config.other_systems.exported import Exported
from shardwright.config.other_systems.imported import Imported

_SHOWN = 6  # names of settings on a subject


def imported_notes(found: Imported, with_data: bool = True) -> str:
    """Everything that is not as the files have it, or that they don't say."""
    of_data = found.of_data if with_data else ()
    told = (remark[:1].upper() + remark[1:] + "." for remark in of_data)
    return "\n".join([*_lines(found), *(textwrap.fill(one, 110, break_on_hyphens=False) for one in told)])


def _lines(found: Imported) -> Iterator[str]:
    for heading, lines in (
        ("Assumed:", found.assumed),
        ("Said there, and not in the job:", found.lost),
        ("Not known here, and not in the job:", found.unknown),
    ):
        if lines:
            yield heading
            yield from (textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    ") for line in lines)
    if found.without_effect:
        yield "Not read, for it does not change the plan:"
        for about, names in found.without_effect.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = f"{about}: {', '.join(names[:_SHOWN])}{more}"
            yield textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def imported_dict(found: Imported) -> dict[str, Any]:
    """For `--json`."""
    return {
        "job": found.job.model_dump(exclude_defaults=True, mode="json"),
        "assumed": list(found.assumed),
        "lost": list(found.lost),
        "unknown": list(found.unknown),
        "of_data": list(found.of_data),
        "without_effect": {about: list(names) for about, names in found.without_effect.items()},
    }


def exported_notes(found: Exported, title: str) -> str:
    """What of the job is not in the files, and what is in them that the job does not say; a line for each."""
    notes = []
    if found.left_out:
        notes.append(f"Left out, for {title} says it in its own way: {', '.join(found.left_out)}.")
    if found.unsaid_learning_rate is not None:
        notes.append(
            f"The job says no learning rate, and {found.unsaid_learning_rate:g} is in the files; say yours with "
            "--set optimizer.learning_rate=RATE."
        )
    if found.nodes > 1 and "run.sh" in found.files:
        notes.append(
            f"Start run.sh on each of the {found.nodes} nodes, with NODE_RANK (0 to {found.nodes - 1}) and MASTER_ADDR "
            "(the first node's address) in its environment."
        )
    elif found.nodes > 1:
        notes.append(f"It is for {found.nodes} nodes; how they start and find each other is your launcher's to say.")
    return "\n".join(textwrap.fill(note, 110, break_on_hyphens=False) for note in notes)
