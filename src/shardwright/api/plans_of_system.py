"""Plans that another training system has: a search held to them, and the job that is written for the system."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardwright.api.asked_job import AskedJob, JobToPlan
from shardwright.api.found_plans import PlanQuestion, found_plans
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.software import software_of
from shardwright.interchange.exported import Lacking, exported
from shardwright.interchange.system import SYSTEMS, System
from shardwright.planner.advice.objections import Objection
from shardwright.planner.search.constraints import Constraints
from shardwright.report.plans_text import plan_words


def job_of_system(system: System, asked_job: AskedJob) -> tuple[JobSpec, tuple[str, ...]]:
    """The job under its own plan; a model, or half a plan, under the best plan that a system has; and notes about
    values that nobody stated. Raises PlanError."""
    if not asked_job.needs_plan:
        return asked_job.as_planned(), asked_job.notes
    own_notes = asked_job.notes
    _, to_plan = planned_for(system.name, asked_job.to_plan())
    restrict = partial(held_to, system, to_plan.job.cluster.software)
    plans = found_plans(
        asked_job.subject, to_plan, PlanQuestion(), restrict, objection=partial(export_objection, system)
    )
    if plans.best is None:
        fault = say(
            "no plan that {system} has fits on {cluster}; use more --devices",
            system=system.title,
            cluster=f"{to_plan.job.cluster.num_devices:,} {to_plan.job.cluster.device}",
        )
        raise PlanError(asked_job.subject, [fault])
    chosen = say(
        "the plan is what `plan --for {name}` recommends: {plan}; set plan.tp and others for your own",
        name=system.name,
        plan=plan_words(plans.best.plan),
    )
    return plans.best, (*own_notes, chosen)


def planned_for(name: str, to_plan: JobToPlan) -> tuple[System, JobToPlan]:
    """A system, and the job as its software unless it names other software than this runtime, with a note on
    exporting."""
    system = SYSTEMS[name]

    def of_system(job: JobSpec) -> JobSpec:
        if not software_of(job.cluster.software).is_own:
            return job
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": system.software})})

    own_job = to_plan.own_job and of_system(to_plan.own_job)
    noted = _with_export_note(system, to_plan)
    return system, replace(noted, job=of_system(to_plan.job), own_job=own_job)


def _with_export_note(system: System, to_plan: JobToPlan) -> JobToPlan:
    """The job with a note on how a plan of a system is written."""
    note = say(
        "every plan is one that {title} has: write it with --toml FILE, and `shardwright export FILE --to {name}` "
        "writes its files",
        title=system.title,
        name=system.name,
    )
    return replace(to_plan, notes=(*to_plan.notes, note))


def kept_to(
    name: str | None, system: System | None, to_plan: JobToPlan
) -> tuple[System | None, JobToPlan, Callable[[JobSpec], Objection | None] | None]:
    """The system to whose plans a search is held, the job for it, and the objection to plans that it does not have: the
    system of a name, or else that of the job's own files, unless that has not what the job trains, whatever its plan
    is. All are as given and None where neither is there."""
    if name:
        named, to_plan = planned_for(name, to_plan)
        return named, to_plan, partial(export_objection, named)
    own = export_objection(system, to_plan.own_job) if system and to_plan.own_job else None
    if system is None or (own and not own.fields):
        return system, to_plan, None
    return system, _with_export_note(system, to_plan), partial(export_objection, system)


def export_objection(system: System, job: JobSpec) -> Objection | None:
    """The first reason why a system does not have a job as it is, with the fields at fault; None if it has."""
    try:
        exported(system, job)
    except Lacking as error:
        names = [name.removeprefix("plan.") for name in error.fields if name.startswith("plan.")]
        return Objection(error.faults[0], {name: getattr(job.plan, name) for name in names})
    return None


def held_to(system: System, software: str, constraints: Constraints) -> Constraints:
    """The constraints, reduced to values that the system supports, and the generation of it that prices the job."""
    return replace(constraints, among={**constraints.among, **system.has(software)})
