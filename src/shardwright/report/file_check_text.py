"""The check of a file with a job: its values, and its text, a line for each question."""

import re
from dataclasses import dataclass

from shardwright.config.base import printable
from shardwright.config.phrase import ENGLISH, Phrase, in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.config.units import GIB, memory_text, seconds_text

EXPERTS = "a group of"  # with which a finding on experts begins
_LABELS = 8  # columns of the names of lines
_DIVIDES = re.compile(r"does not (split|divide)|not a multiple of")


@dataclass(frozen=True)
class FileCheck:
    """The findings on one file. None is unknown. `findings` are sentences with a way out; none if all is fine.

    `missing_bytes` are lacking on the fullest device, `slack_bytes` are held by the allocator beside what it gives out.
    `microbatches` times the replicas times the microbatch are the batch. `expert_nodes` are the domains of fast links
    over which a group of experts spreads; 0 without experts. `readable` is False if the file is no job of any system.
    """

    name: str
    system: str
    readable: bool = True
    legal: bool = False
    findings: tuple[str, ...] = ()
    fits: bool | None = None
    missing_bytes: int = 0
    slack_bytes: int | None = None
    batch: int | None = None
    microbatches: int | None = None
    expert_nodes: int | None = None
    step_s: float | None = None

    @property
    def exit_status(self) -> int:
        """0 if all is fine, 1 with a finding, 2 if the file can't be read."""
        return 2 if not self.readable else int(bool(self.findings))


def no_fit(way_out: str) -> Phrase:
    """The finding that a plan does not fit."""
    return say("it does not fit; {way_out}", way_out=way_out)


def file_check_text(check: FileCheck, language: str = ENGLISH) -> str:
    """The lines of a file in a language: its name and system, then legality, memory, batch, experts, slack and time.
    Each finding has a way out; all of those by which a file is not legal are there."""
    lines = [_printable(f"{check.name} ({check.system})")]
    for name, text in _lines(check):
        label = in_language(name, language)
        lines.append(f"  {label}{' ' * (_LABELS - num_columns(label))}{_printable(in_language(text, language))}")
    return "\n".join(lines)


def _printable(text: str) -> str:
    return " ".join(printable(text).split())


def _lines(check: FileCheck) -> list[tuple[str, str]]:
    """(name, text) of the lines below the name of a file."""
    if not (check.readable and check.legal):
        first, *others = check.findings
        refused = say("legal") if check.readable else say("read")
        divides = [fault for fault in check.findings if _DIVIDES.search(fault)]
        return [
            (refused, say("no: {reason}", reason=first)),
            *((say("also"), fault) for fault in others),
            *((say("divides"), say("no: {reason}", reason=fault)) for fault in divides[:1]),
        ]
    lines: list[tuple[str, str]] = [(say("legal"), say("yes")), (say("fits"), _fit(check))]
    batch = say(
        "batch {batch} in {microbatches} microbatches a replica", batch=check.batch, microbatches=check.microbatches
    )
    lines.append((say("divides"), batch))
    if check.expert_nodes:
        outside = next((finding for finding in check.findings if finding.startswith(EXPERTS)), "")
        lines.append((say("experts"), outside or say("inside one domain of fast links")))
    if check.slack_bytes is not None:
        slack = memory_text(check.slack_bytes)
        lines.append((say("slack"), say("{slack} that the allocator holds beside what it gives out", slack=slack)))
    if check.step_s is not None:
        lines.append((say("time"), say("{seconds} a step", seconds=seconds_text(check.step_s))))
    return lines


def _fit(check: FileCheck) -> str:
    if check.fits is None:
        return say("not judged, for the device is unknown (--device NAME)")
    if check.fits:
        return say("yes")
    lacking = say("its host lacks memory")
    if check.missing_bytes:
        lacking = say("{excess:.1f} GiB too much", excess=check.missing_bytes / GIB)
    template = no_fit("").template
    ways_out = [
        text.values["way_out"] for text in check.findings if isinstance(text, Phrase) and text.template == template
    ]
    return say("no: {lacking}; {way_out}", lacking=lacking, way_out=ways_out[0])
