"""One plan with every generation of software in the catalog, side by side."""

from dataclasses import dataclass

from shardwright.config import catalog
from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import memory_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import fullest
from shardwright.report.text_columns import aligned
from shardwright.simulate.full_step import simulated_step


@dataclass(frozen=True)
class SoftwareRow:
    """A plan with one generation of software: its step, the memory of its fullest process, and the strategies of the
    plan that the software lacks."""

    software: str
    step_s: float
    mfu: float
    process_bytes: int
    lacks: tuple[str, ...]


def software_rows(job: JobSpec) -> list[SoftwareRow]:
    """The plan with the job's own software first, then with all others of the catalog, fastest first.

    KeyError names an unknown number of the job's device."""
    own_software = job.cluster.software
    rows = [_with(job, name) for name in dict.fromkeys((own_software, *catalog.names("software")))]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.step_s)]


def _with(job: JobSpec, name: str) -> SoftwareRow:
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": name})})
    step, memory = simulated_step(job, shipped()), fullest(job, shipped())
    return SoftwareRow(
        name, float(step.total), float(step.mfu), int(memory.process), missing_features(software_of(name), job)
    )


def software_table(rows: list[SoftwareRow]) -> str:
    """The plans as a table."""
    table = [["software", "step", "MFU", "process", "lacks"]]
    for row in rows:
        lacking = ", ".join(row.lacks)
        table.append(
            [row.software, seconds_text(row.step_s), f"{row.mfu:.1%}", memory_text(row.process_bytes), lacking]
        )
    return "The same plan with other software (--as NAME prices all of it so):\n" + aligned(table, left=(0, 4))
