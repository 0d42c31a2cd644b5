"""The check of a file with a job: its values, and its text, one line."""

from dataclasses import dataclass

from shardwright.config.base import printable
from shardwright.config.units import GIB, counted, memory_text, seconds_text


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
    """The line of a file: its system, values and the first finding with the number of others."""
    parts = [f"legal, {_values(check)}"] if check.legal else ["not legal" if check.readable else "not read"]
    if check.findings:
        more = len(check.findings) - 1
        parts.append(check.findings[0] + (f" (and {counted(more, 'further finding')})" if more else ""))
    return " ".join(printable(f"{check.name} ({check.system}): {'; '.join(parts)}").split())


def _values(check: FileCheck) -> str:
    if check.fits is None:
        fit = "memory not judged (--device NAME)"
    elif check.fits:
        fit = "fits"
    else:
        fit = f"{check.missing_bytes / GIB:.1f} GiB too much" if check.missing_bytes else "its host lacks memory"
    values = [fit, f"batch {check.batch} in {check.microbatches} microbatches a replica"]
    if check.expert_nodes:
        values.append(f"experts over {counted(check.expert_nodes, 'domain')}")
    if check.slack_bytes:
        values.append(f"allocator's slack {memory_text(check.slack_bytes)}")
    if check.step_s is not None:
        values.append(f"{seconds_text(check.step_s)} a step")
    return ", ".join(values)
