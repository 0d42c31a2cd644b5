"""The conversion of a plan with a budget for activations into one that names the operators to recompute."""

from pkgutil import resolve_name

from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES


def meet_budget(job: JobSpec) -> JobSpec:
    """The job with plan.recompute = "layers" and the operators of each layer, if its policy has to choose them.

    Other jobs are returned unchanged. PlanError if a rank can't fit the limit.
    """
    facts = RECOMPUTES[job.plan.recompute]
    if not facts.chosen_by:
        return job
    layers = resolve_name(facts.chosen_by)(job)  # imported only now: it needs numpy, and few plans have a budget
    chosen = {"recompute": "layers", "recompute_layers": layers, "memory_limit_gib": 0.0}
    return job.model_copy(update={"plan": job.plan.model_copy(update=chosen)})
