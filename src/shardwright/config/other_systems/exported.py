"""A job as another system's files, where that system has its plan; else what it lacks, and the nearest plan it has.

What is written is read back before anybody gets it. So a plan is written whole or not at all, and what differs is what
the system lacks.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.imported import Asked
from shardwright.config.other_systems.meaning import differences
from shardwright.config.other_systems.nearest import near_job, variants
from shardwright.config.other_systems.script_text import nodes_of
from shardwright.config.other_systems.systems import System, job_of_texts

_SECTIONS = ("data", "run", "checkpoint", "health")  # that other systems say in their own way
_HOW = ("bucket_mib", "loss_chunk_mib", "compress_least", "fallback")  # of [plan], how and when it is done


@dataclass(frozen=True)
class Exported:
    """Files by their names, fields of the job that are not in them, and the learning rate if the job left it to us."""

    files: dict[str, str]
    left_out: tuple[str, ...]
    unsaid_learning_rate: float | None
    nodes: int = 1


class Lacking(PlanError):  # noqa: N818 (what a plan needs and a system has not)
    """A plan that a system does not have. `nearest` is the one that it has."""

    def __init__(self, subject: str, faults: list[str], nearest: JobSpec | None) -> None:
        super().__init__(subject, faults)
        self.nearest = nearest


def exported(system: System, job: JobSpec) -> Exported:
    """The job in the files of a system. Raises Lacking."""
    subject = f"job {job.name} for {system.title}"
    try:
        files = system.write(job)
    except PlanError as error:
        raise Lacking(subject, [f"{system.title} has no such job: {fault}" for fault in error.faults], None) from None
    try:
        back = job_of_texts(system, files, asked_of(job), subject).job
    except PlanError as error:
        if (near := _nearest(system, job)) is None:
            raise Lacking(subject, [_no_such_job(system, fault) for fault in error.faults], None) from None
        raise Lacking(subject, [_lack(system, *one) for one in differences(job, near)], near) from None
    differing = differences(job, back)
    if differing:
        near = _nearest(system, job)
        raise Lacking(subject, [_lack(system, *one) for one in (differences(job, near) if near else differing)], near)
    optimizer = job.optimizer
    unsaid = None if "learning_rate" in optimizer.model_fields_set else optimizer.learning_rate
    return Exported(files, tuple(_left_out(job)), unsaid, nodes_of(job)[0])


def asked_of(job: JobSpec) -> Asked:
    """Fields that files leave to the command line: how many devices there are."""
    nodes, each = nodes_of(job)
    return Asked(cluster=AskedCluster(nodes * each, "", each))


def _no_such_job(system: System, fault: str) -> str:
    """Why a job can't be written. A fault of reading it back names a way out for who brings files, which is none for
    who writes them."""
    return f"{system.title} has no such job: {fault.rpartition('; ')[0] or fault}; take another --to"


def _lack(system: System, name: str, mine: Any, settings: Any) -> str:
    if settings is None:
        return f"{name} = {_shown(mine)} can't be said to {system.title}"
    return f"{name} = {_shown(mine)} can't be said to {system.title}; the nearest is {_shown(settings)}"


def _shown(value: Any) -> str:
    return shortened(str(value), 80)


def _there_and_back(system: System, job: JobSpec, subject: str) -> tuple[dict[str, str], JobSpec]:
    files = system.write(job)
    return files, job_of_texts(system, files, asked_of(job), subject).job


def _nearest(system: System, job: JobSpec) -> JobSpec | None:
    """The job that the system has and that differs in the fewest fields."""
    candidates = []
    for variant in variants(job):
        with suppress(PlanError):
            back = _there_and_back(system, variant, "a variant")[1]
            near = near_job(variant, back, differences(variant, back))
            if near is not None and not differences(near, _there_and_back(system, near, "a variant")[1]):
                candidates.append(near)
    return min(
        candidates, key=lambda near: (len(differences(job, near)), abs(near.plan.zero - job.plan.zero)), default=None
    )


def _left_out(job: JobSpec) -> list[str]:
    """Fields that are set and not written."""
    fields = job.model_dump(exclude_defaults=True)
    names = [f"{section}.{name}" for section in _SECTIONS for name in fields.get(section, {})]
    return names + [f"plan.{name}" for name in _HOW if name in fields.get("plan", {})]
