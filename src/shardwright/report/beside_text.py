"""One plan as it would be with every generation of software that the catalog knows, side by side."""

from dataclasses import dataclass

from shardwright.config import catalog
from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.config.software_support import lacks
from shardwright.config.units import memory_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.cost.job_memories import fullest
from shardwright.report.text_columns import aligned
from shardwright.simulate.full_step import simulated_step


@dataclass(frozen=True)
class Beside:
    """A plan with one generation of software: its step, the memory of its fullest process, and the strategies of the
    plan that the software lacks."""

    software: str
    step_s: float
    mfu: float
    process_bytes: int
    lacks: tuple[str, ...]


def beside(job: JobSpec) -> list[Beside]:
    """The plan with the job's own software first, then with all others of the catalog, fastest first.

    KeyError names an unknown number of the job's device."""
    own_software = job.cluster.software
    rows = [_with(job, name) for name in dict.fromkeys((own_software, *catalog.names("software")))]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.step_s)]


def _with(job: JobSpec, name: str) -> Beside:
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": name})})
    step, memory = simulated_step(job, shipped()), fullest(job, shipped())
    return Beside(name, float(step.total), float(step.mfu), int(memory.process), lacks(software_of(name), job))


def beside_text(rows: list[Beside]) -> str:
    """The plans as a table."""
    table = [["software", "step", "MFU", "process", "lacks"]]
    for row in rows:
        lacking = ", ".join(row.lacks)
        table.append(
            [row.software, seconds_text(row.step_s), f"{row.mfu:.1%}", memory_text(row.process_bytes), lacking]
        )
    return "The same plan with other software (--as NAME prices all of it so):\n" + aligned(table, left=(0, 4))
