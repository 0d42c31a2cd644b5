"""The conversion of a plan with a budget for activations into one that names the operators to recompute."""

from shardwright.config.job import JobSpec


def meet_budget(job: JobSpec) -> JobSpec:
    """The job with plan.recompute = "layers" and the operators of each layer, if it was "budget".

    A job without a budget is returned unchanged. PlanError if a rank can't fit the limit.
    """
    if job.plan.recompute != "budget":
        return job
    from shardwright.memory.recompute_budget import chosen_layers  # it needs numpy, and few plans have a budget

    chosen = {"recompute": "layers", "recompute_layers": chosen_layers(job), "memory_limit_gib": 0.0}
    return job.model_copy(update={"plan": job.plan.model_copy(update=chosen)})
