"""Check that the experts of the model fit the plan."""

from shardwright.config.divisors import all_divisors, nearest_divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES


def expert_faults(job: JobSpec) -> list[str]:
    """Contradictions between experts and other fields of a job. check.py checks that experts can fold the ranks."""
    return _without_experts(job) if not job.model.moe.experts else [*_cut_faults(job), *_unsupported(job)]


def _without_experts(job: JobSpec) -> list[str]:
    fields = [name for name in ("ep", "expert_tp") if getattr(job.plan, name) > 1]
    return [
        say(
            "plan.{name} {value} spreads experts, and model.moe.experts is 0; leave plan.{name} out, or set "
            "model.moe.experts",
            name=name,
            value=getattr(job.plan, name),
        )
        for name in fields
    ]


def _cut_faults(job: JobSpec) -> list[str]:
    moe, plan, dense = job.model.moe, job.plan, job.model.ffn_size
    faults: list[str] = []
    if moe.experts % plan.ep:
        faults.append(
            say(
                "plan.ep {ep} does not divide {experts} experts ({experts} / {ep} = {quotient:.2f}); use {choices}",
                ep=plan.ep,
                experts=moe.experts,
                quotient=moe.experts / plan.ep,
                choices=all_divisors(moe.experts),
            )
        )
    widths = (
        (say("an expert"), moe.ffn_size(dense), "expert_tp", plan.expert_tp_size),
        (say("the shared experts"), moe.shared_size(dense), "tp", plan.tp),
    )
    for what, width, field, degree in widths:
        if width % degree:
            faults.append(
                say(
                    "plan.{field} {degree} does not divide the width {width} of {what} ({width} / {degree} = "
                    "{quotient:.2f}); use {choices}, or another width",
                    field=field,
                    degree=degree,
                    width=width,
                    what=what,
                    quotient=width / degree,
                    choices=nearest_divisors(width, degree),
                )
            )
    return faults


def _unsupported(job: JobSpec) -> list[str]:
    plan, faults = job.plan, list[str]()
    if not SCHEDULES[plan.schedule].drains:
        faults.append(
            say(
                "schedule {schedule} updates weights while the pipeline is full, and the routers of experts learn "
                "from whole steps; use a schedule that drains, such as 1f1b",
                schedule=repr(plan.schedule),
            )
        )
    return faults
