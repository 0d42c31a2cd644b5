"""A job as the user asks for it, read and checked for its use: to predict it, to run it, or to plan it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, error_text
from shardwright.config.checks.check import job_faults
from shardwright.config.hugging_face.config_json import notes_on
from shardwright.config.job import JobSpec
from shardwright.config.load import JobFields, job_to_plan, make_job, read_job, subject_of
from shardwright.config.phrase import say
from shardwright.config.plan import UNSEARCHED
from shardwright.config.units import MIB
from shardwright.config.user_file import FileFault, path_exists, read_text
from shardwright.memory.budget import meet_budget
from shardwright.schedule.job_program import plan_faults

_OWN_SUFFIXES = (".toml", ".json", "")  # of files that may be jobs or models


@dataclass(frozen=True)
class JobToPlan:
    """A job to find a plan for, checked except for its own plan. `own_job` is the job under its own plan, if it has
    one; `own_faults` are the faults of that plan. `notes` are about values that nobody stated.
    `kept` are the fields of a half plan, which every plan for it has."""

    job: JobSpec
    own_job: JobSpec | None = None
    own_faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AskedJob:
    """A job as the user asks for it.

    `job` is a TOML file, a name of the catalog, a config.json or a folder with one, or the fields themselves;
    `overrides` are "section.field=value" strings, as in --set, and `cluster` replaces the job's cluster. `run_tokens`
    are the tokens of the run of a model, if an option states them, as --tokens does; else 0.
    """

    job: str | Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    cluster: AskedCluster = NOTHING_ASKED
    run_tokens: float = 0.0

    @property
    def subject(self) -> str:
        """The subject of a message about the job."""
        return subject_of(self.job)

    @cached_property
    def job_fields(self) -> JobFields:
        """The fields of file and catalog, with the overrides. Raises PlanError with every fault, or for a file of
        another system with the commands that read it."""
        try:
            return read_job(self.job, list(self.overrides), self.cluster, self.run_tokens)
        except PlanError:
            if isinstance(self.job, str) and (fault := _foreign_file(self.job)):
                raise PlanError(self.subject, [fault]) from None
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about values that nobody stated, and about what is not taken of a model's config.json."""
        filled_in = (self.job_fields.filled_in,) if self.job_fields.filled_in else ()
        return (*filled_in, *(notes_on(self.job) if isinstance(self.job, str) else ()))

    def as_planned(self) -> JobSpec:
        """The job under its own plan. Raises PlanError with every fault."""
        return planned(self.subject, make_job(self.job_fields.fields, self.subject))

    def to_run(self) -> JobSpec:
        """The job under its own plan; its fallback plans are checked, too. Raises PlanError."""
        spec = self._completed[0] if self.needs_plan else self.as_planned()
        faults = []
        for number in range(len(spec.plan.fallback)):
            try:
                planned(self.subject, spec.model_copy(update={"plan": spec.plan.fallback_plan(number)}))
            except PlanError as error:
                faults += [
                    say("{place}: {fault}", place=f"plan.fallback[{number}]", fault=fault) for fault in error.faults
                ]
        if faults:
            raise PlanError(self.subject, faults)
        return spec

    def to_predict(self) -> tuple[JobSpec, tuple[str, ...]]:
        """The job under its own plan, or else under the best plan on its cluster; and notes about values that nobody
        stated. Raises PlanError."""
        return self._predicted

    @cached_property
    def _predicted(self) -> tuple[JobSpec, tuple[str, ...]]:
        if self._is_half():
            return self._completed
        if self.job_fields.fields.get("plan"):
            return self.as_planned(), self.notes
        spec = job_to_plan(self.job_fields.fields, self.subject)
        # A plan is always searched for a named model: its batch is a usual one, not one that was chosen for one rank,
        # and its device is known.
        if not (self.job_fields.is_model or _has_many_plans(spec)):
            return self.as_planned(), self.notes
        return self._completed

    @cached_property
    def _completed(self) -> tuple[JobSpec, tuple[str, ...]]:
        """The job under the best plan that has what is asked for, and notes. Of half a plan that no plan completes so
        that it fits, the rest has defaults. Raises PlanError."""
        to_plan = self.to_plan()
        best_job, kept = _best_job(self.subject, to_plan), _kept_words(to_plan)
        if best_job is not None:
            from shardwright.report.plans_text import plan_words

            note = say(
                "the plan is what `plan` recommends{kept}: {plan}; set plan.tp and others for your own",
                kept=kept,
                plan=plan_words(best_job.plan),
            )
            return best_job, (*self.notes, note)
        cluster = f"{to_plan.job.cluster.num_devices:,} {to_plan.job.cluster.device}"
        if kept:
            note = say("no plan{kept} fits on {cluster}; the rest has its defaults", kept=kept, cluster=cluster)
            return self.as_planned(), (*self.notes, note)
        name = self.subject.removeprefix("job ")
        raise PlanError(
            self.subject, [say("no plan of {name} fits on {cluster}; use more --devices", name=name, cluster=cluster)]
        )

    @property
    def needs_plan(self) -> bool:
        """True for a model and for half a plan, whose plan is searched."""
        return self._is_half() or (self.job_fields.is_model and not self.job_fields.fields.get("plan"))

    def _is_half(self) -> bool:
        """True if the user asks for a part of a plan, and the rest can be chosen."""
        asked = self.job_fields.asked_plan
        if not asked:
            return False
        from shardwright.planner.search.constraints import SEARCHED  # needs numpy, which whole plans do not

        if not all(name in SEARCHED or name in UNSEARCHED for name in asked):
            return False
        return _has_many_plans(job_to_plan(self.job_fields.fields, self.subject))

    def to_plan(self) -> JobToPlan:
        """The job to find a plan for. Its cluster may not allow its own plan. Raises PlanError."""
        spec = job_to_plan(self.job_fields.fields, self.subject)
        if self._is_half():
            kept = {name: value for name, value in self.job_fields.asked_plan.items() if name not in UNSEARCHED}
            spec = spec.model_copy(update={"plan": spec.plan.unsearched()})
            return JobToPlan(spec, notes=self.notes, kept=kept)
        to_plan = with_own_plan(spec) if self.job_fields.fields.get("plan") else JobToPlan(spec)
        return replace(to_plan, notes=self.notes)


def _has_many_plans(spec: JobSpec) -> bool:
    """True if plans of the job can be compared: not on one device, on a device of unknown speed, or on several kinds of
    devices, whose stages `layout` chooses."""
    return spec.cluster.num_devices > 1 and spec.cluster.device != "unknown" and not spec.cluster.parts


def with_own_plan(spec: JobSpec) -> JobToPlan:
    """A job to find a plan for, with a plan of its own that may have faults."""
    faults = job_faults(spec) or plan_faults(spec)
    if not faults:
        try:
            spec = meet_budget(spec)
        except PlanError as error:
            faults = error.faults
    if faults:
        return JobToPlan(spec.model_copy(update={"plan": spec.plan.unsearched()}), spec, tuple(faults))
    return JobToPlan(spec, spec)


def planned(subject: str, spec: JobSpec) -> JobSpec:
    """The job with its plan checked, and with recomputation to its memory budget. Raises PlanError."""
    if faults := plan_faults(spec):
        raise PlanError(subject, faults)
    return meet_budget(spec)


def _foreign_file(path: str) -> str:
    """A fault for a file that is no job and no model: of another training system, with the commands that read it, or of
    none; empty for any other file."""
    from shardwright.interchange.recognised import JOB, UnknownSystem, no_job_fault, system_name_of
    from shardwright.interchange.system import SOURCES

    if not path_exists(path) or Path(path).is_dir():
        return ""
    is_named_as_job = Path(path).suffix.lower() in _OWN_SUFFIXES
    try:
        system = system_name_of(path, read_text(Path(path), MIB, "configuration"))
    except UnknownSystem:
        return "" if is_named_as_job else no_job_fault(path)
    except PlanError as error:
        return "" if is_named_as_job else say("{path} is no job: {fault}", path=path, fault=error.faults[0])
    except (FileFault, OSError):
        return ""
    if system == JOB:
        return ""
    fault = say(
        "{path} is no job, and looks like a file of {title}: `shardwright import {system} {path}` prints it as a job, "
        "and `shardwright estimate --from {system} {path}` predicts it",
        path=path,
        title=SOURCES[system].title,
        system=system,
    )
    return say(
        "{fault}; `shardwright plan --from {system} {path}` with --device finds better plans for it",
        fault=fault,
        system=system,
        path=path,
    )


def _best_job(subject: str, to_plan: JobToPlan) -> JobSpec | None:
    """The job under the recommended plan; None if no plan fits. Raises PlanError."""
    from shardwright.cost.calibration import shipped
    from shardwright.planner.advice.recommendation import plans_of
    from shardwright.planner.search.constraints import Constraints

    try:
        recommendation = plans_of(to_plan.job, Constraints().with_kept(to_plan.kept), shipped()).recommendation
    except KeyError as error:
        raise PlanError(subject, [error_text(error)]) from None
    return recommendation.plan.job if recommendation else None


def _kept_words(to_plan: JobToPlan) -> str:
    """ " with plan.tp=4", the half of a plan that the user asks for; empty if there is none."""
    kept = tuple(f"plan.{name}={value}" for name, value in to_plan.kept.items())
    return say(" with {kept}", kept=kept) if kept else ""
