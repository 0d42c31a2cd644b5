"""The files that a job was read from, and what plans proposed for it may be: those that its own system has."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.interchange.exported import exported
from shardwright.interchange.imported import Imported
from shardwright.interchange.system import System, system_of


@dataclass(frozen=True)
class JobFiles:
    """The files of a job: their system, which writes such files, too; the settings that they have; and those that they
    leave to another file ("auto")."""

    system: System
    names: frozenset[str] = frozenset()
    automatic: frozenset[str] = frozenset()

    def has(self, job: JobSpec) -> bool:
        """True if the system can say a job as it is."""
        try:
            exported(self.system, job)
        except PlanError:
            return False
        return True


def origin_of(name: str, files: Iterable[str], imported: Imported) -> JobFiles | None:
    """The files that a job was read from; None if their system is read alone."""
    system = system_of(name, files)
    return JobFiles(system, imported.names, imported.automatic) if isinstance(system, System) else None
