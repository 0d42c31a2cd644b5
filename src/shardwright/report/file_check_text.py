"""The check of a file with a job: its values, and its text, a line for each question."""

import re
from dataclasses import dataclass

from shardwright.config.base import printable
from shardwright.config.units import GIB, counted, memory_text, seconds_text

NO_FIT, EXPERTS = "it does not fit", "a group of"  # with which findings on memory and on experts begin
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


def file_check_text(check: FileCheck) -> str:
    """The lines of a file: its name and system, then legality, memory, batch, experts, slack and seconds. What is
    wrong has a way out."""
    lines = [("", f"{check.name} ({check.system})"), *_lines(check)]
    return "\n".join(f"  {name:<8}{text}" if name else text for name, text in _printable(lines))


def _printable(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, " ".join(printable(text).split())) for name, text in lines]


def _lines(check: FileCheck) -> list[tuple[str, str]]:
    """(name, text) of the lines below the name of a file."""
    if not check.readable:
        return [("read", f"no: {check.findings[0]}")]
    if not check.legal:
        more = len(check.findings) - 1
        divides = [fault for fault in check.findings if _DIVIDES.search(fault)]
        text = check.findings[0] + (f" (and {counted(more, 'further finding')})" if more else "")
        return [("legal", f"no: {text}"), *([("divides", f"no: {divides[0]}")] if divides else [])]
    lines = [("legal", "yes"), ("fits", _fit(check))]
    lines.append(("divides", f"batch {check.batch} in {check.microbatches} microbatches a replica"))
    if check.expert_nodes:
        outside = next((finding for finding in check.findings if finding.startswith(EXPERTS)), "")
        lines.append(("experts", outside or "inside one domain of fast links"))
    if check.slack_bytes is not None:
        lines.append(("slack", f"{memory_text(check.slack_bytes)} that the allocator holds beside what it gives out"))
    if check.step_s is not None:
        lines.append(("seconds", f"{seconds_text(check.step_s)} a step"))
    return lines


def _fit(check: FileCheck) -> str:
    if check.fits is None:
        return "not judged, for the device is unknown (--device NAME)"
    if check.fits:
        return "yes"
    lacking = f"{check.missing_bytes / GIB:.1f} GiB too much" if check.missing_bytes else "its host lacks memory"
    way_out = next((finding for finding in check.findings if finding.startswith(NO_FIT)), NO_FIT)
    return f"no: {lacking}{way_out.removeprefix(NO_FIT)}"
