"""The effect of each strategy of a plan: the same job without it, and the memory that a rank would hold then."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.recompute_facts import optional_recompute_fields
from shardwright.memory.job_memories import job_accounts
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.groups import num_replicas
from shardwright.sharding.memory_account import RankMemory


@dataclass(frozen=True)
class Effect:
    """A strategy, its effect in words, and the memory of one rank with the plan and without the strategy."""

    strategy: str
    does: str
    with_it: RankMemory
    without_it: RankMemory


def effects(job: JobSpec, rank: int, current: RankMemory) -> Iterator[Effect]:
    """One effect for each strategy of the plan that can be left out, on a pipeline rank that holds `current`."""
    for strategy, does, section, changed in _strategies(job):
        spec = getattr(job, section)
        without_strategy = job.model_copy(update={section: spec.model_copy(update=changed)})
        if not (job_faults(without_strategy) or plan_faults(without_strategy)):
            (memory_without,) = job_accounts(without_strategy, [rank])
            yield Effect(strategy, does, current, memory_without)


def _strategies(job: JobSpec) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(name, effect in words, section of the job, the section's fields without the strategy)."""
    plan = job.plan
    if plan.zero and num_replicas(plan) > 1:
        shared = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients, parameters"}
        does = say(
            "replicas share {state}; gradients are scattered, and parameters gathered", state=say(shared[plan.zero])
        )
        without: dict[str, Any] = {"zero": 0, "zero_ranks": 0, "offload_parameters": False}
        yield say("ZeRO {stage}", stage=plan.zero), does, "plan", without
    if plan.sequence_parallel and plan.tp > 1:
        does = say(
            "ranks of tp share the tokens between products; sums become scatters, and gathers stand before products"
        )
        yield say("sequence parallel"), does, "plan", {"sequence_parallel": False}
    if plan.recompute != "none":
        does = say("activations are computed again in the backward instead of being kept")
        unused = PlanSpec()
        without = {name: getattr(unused, name) for name in ("recompute", *optional_recompute_fields())}
        yield say("recompute {policy}", policy=plan.recompute), does, "plan", without
    for field, data in (("optimizer", "optimizer state"), ("parameters", "shards"), ("activations", "layers' inputs")):
        if value := getattr(plan, f"offload_{field}"):
            does = say("{state} in host memory", state=say(data))
            if value is not True:
                does = say("{share:g} of the {state} in host memory", share=value, state=say(data))
            yield say("offload {field}", field=field), does, "plan", {f"offload_{field}": type(value)(0)}
    if plan.compress != "none":
        does = say("gradients are made smaller on their way; what is lost is added to the next step's")
        yield say("compress {method}", method=plan.compress), does, "plan", {"compress": "none"}
    if job.precision.float8 != "none":
        does = say("products of linear layers in fp8, with casts of weights kept")
        yield (
            say("fp8 {recipe}", recipe=job.precision.float8),
            does,
            "precision",
            {"float8": "none", "float8_weight_gradients": False},
        )
    if job.precision.float8_weight_gradients:
        does = say("weight gradients in fp8 too, and inputs of products kept so")
        yield say("fp8 weight gradients"), does, "precision", {"float8_weight_gradients": False}
    if job.precision.float8_dispatch:
        does = say("tokens travel to experts in fp8, and in the backward gradients")
        yield say("fp8 dispatch"), does, "precision", {"float8_dispatch": False}
    if job.precision.master == "none" and job.precision.compute != "float32":
        does = say(
            "weights have no float32 copy, and are rounded after each step: smaller changes than half a place are lost"
        )
        yield say("no master weights"), does, "precision", {"master": "float32"}
    if job.precision.moments != "float32":
        does = say("AdamW's two moments rounded after each step, which halves them; arithmetic stays in float32")
        yield say("{number} moments", number=job.precision.moments), does, "precision", {"moments": "float32"}
