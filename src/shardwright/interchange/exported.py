"""A job as another system's files, if that system has its plan; else what the system lacks, and its nearest plan.

The files are read back before they are returned. A plan is therefore written completely or not at all, and a field that
comes back with another value is one that the system lacks.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say, without_way_out
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.meaning import differences
from shardwright.interchange.nearest import near_job, variants
from shardwright.interchange.reading.script_text import nodes_of
from shardwright.interchange.system import System

_SECTIONS = ("data", "run", "checkpoint", "health")  # each system has its own form of them
_WITHOUT_EFFECT = (
    "bucket_mib",
    "loss_chunk_mib",
    "compress_least",
    "fallback",
)  # fields of [plan] that do not change the plan


@dataclass(frozen=True)
class Exported:
    """Files by name, fields of the job that they lack, and the learning rate that was written if the job sets none."""

    files: dict[str, str]
    left_out: tuple[str, ...]
    unsaid_learning_rate: float | None
    nodes: int = 1


class Lacking(PlanError):  # noqa: N818 (it names what the system lacks)
    """A plan that a system lacks. `nearest` is a job with the nearest plan that the system has; None if unknown.
    `fields` are the fields of the job, such as "plan.zero", that the system cannot say."""

    def __init__(
        self, subject: str, faults: Sequence[str], nearest: JobSpec | None, fields: Sequence[str] = ()
    ) -> None:
        super().__init__(subject, faults)
        self.nearest, self.fields = nearest, tuple(fields)


def exported(system: System, job: JobSpec) -> Exported:
    """The job as files of a system. Raises Lacking."""
    subject = say("job {name} for {system}", name=job.name, system=system.title)
    if job.model.is_adapted:
        fault = say(
            "adapters are not written for {system}; leave model.adapter out to write the job of all weights, or train "
            "them here and export them for peft",
            system=system.title,
        )
        raise Lacking(subject, [fault], None)
    try:
        files = system.write(job)
    except PlanError as error:
        faults = [say("{system} has no such job: {fault}", system=system.title, fault=fault) for fault in error.faults]
        raise Lacking(subject, faults, None) from None
    try:
        back = job_of_texts(system, files, asked_of(job), subject).job
    except PlanError as error:
        if (near := _nearest(system, job)) is None:
            raise Lacking(subject, [_no_such_job(system, fault) for fault in error.faults], None) from None
        raise _lacking(system, job, subject, differences(job, near), near) from None
    differing = differences(job, back)
    if differing:
        near = _nearest(system, job)
        raise _lacking(system, job, subject, differences(job, near) if near else differing, near)
    optimizer = job.optimizer
    unsaid = None if "learning_rate" in optimizer.model_fields_set else optimizer.learning_rate
    return Exported(files, tuple(_left_out(job)), unsaid, nodes_of(job)[0])


def asked_of(job: JobSpec) -> Asked:
    """The cluster of a job, which reading its files back needs: how many devices there are."""
    nodes, devices_per_node = nodes_of(job)
    return Asked(cluster=AskedCluster(nodes * devices_per_node, "", devices_per_node))


def _no_such_job(system: System, fault: str) -> str:
    """A fault of reading the written files back. Its own way out is for users who import files, so it is replaced."""
    return say(
        "{system} has no such job: {fault}; take another --to", system=system.title, fault=without_way_out(fault)
    )


def _lacking(
    system: System, job: JobSpec, subject: str, differing: Sequence[tuple[str, Any, Any]], near: JobSpec | None
) -> Lacking:
    """The error of a job whose fields differ from those that the system would give it."""
    faults = [_lack(system, job, *difference) for difference in differing]
    return Lacking(subject, faults, near, [name for name, _, _ in differing])


def _lack(system: System, job: JobSpec, name: str, wanted: Any, nearest: Any) -> str:
    if name == "plan.recompute" and isinstance(wanted, list):
        wanted = say("{policy}, which is {value},", policy=job.plan.recompute, value=_shown(wanted))
    lack = say("{name} = {value} can't be said to {system}", name=name, value=_shown(wanted), system=system.title)
    return lack if nearest is None else say("{lack}; the nearest is {value}", lack=lack, value=_shown(nearest))


def _shown(value: Any) -> str:
    return shortened(value if isinstance(value, Phrase) else str(value), 80)


def _there_and_back(system: System, job: JobSpec, subject: str) -> tuple[dict[str, str], JobSpec]:
    files = system.write(job)
    return files, job_of_texts(system, files, asked_of(job), subject).job


def _nearest(system: System, job: JobSpec) -> JobSpec | None:
    """The job that the system can express and that differs from `job` in the fewest fields; None if there is none."""
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
    """Fields that the job sets and that are not written."""
    fields = job.model_dump(exclude_defaults=True)
    names = [f"{section}.{name}" for section in _SECTIONS for name in fields.get(section, {})]
    return names + [f"plan.{name}" for name in _WITHOUT_EFFECT if name in fields.get("plan", {})]
