"""Parts of a plan that a generation of software lacks: its catalog entry lists its known abilities."""

from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import fixed, say
from shardwright.config.plan import PlanSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.software import SoftwareSpec


def missing_features(software: SoftwareSpec, job: JobSpec) -> tuple[str, ...]:
    """The strategies that the job's plan needs and the software does not have, in words. Unknown ones are left out."""
    return plan_lacks(software, job.plan)


def had_by(software: SoftwareSpec) -> dict[str, tuple[Any, ...]]:
    """The values that the software supports, by field of the plan; a field is left out if the entry does not say."""
    supported: dict[str, Any] = {
        "schedule": software.schedules,
        "zero": software.zero_stages,
        "sequence_parallel": (False,) if software.sequence_parallel is False else None,
        "cp": (1,) if software.context_parallel is False else None,
        "cp_method": software.context_methods,
        "recompute": software.recomputes,
        "zero_ranks": (0,) if software.hybrid_sharding is False else None,
        "layout": ([],) if software.uneven_stages is False else None,
    }
    if software.recomputed_operators is not None:
        supported["recompute_operators"] = [list(operators) for operators in software.recomputed_operators]
    if software.offloads is not None:
        unused = {"offload_optimizer": (0.0,), "offload_parameters": (False,), "offload_activations": (False,)}
        supported |= {
            name: values for name, values in unused.items() if name.removeprefix("offload_") not in software.offloads
        }
    return {name: tuple(values) for name, values in supported.items() if values is not None}


def plan_lacks(software: SoftwareSpec, plan: PlanSpec) -> tuple[str, ...]:
    """The strategies that a plan needs and the software does not have, in words."""
    supported = had_by(software)

    def lacking(field: str, words: str, is_used: bool = True) -> list[str]:
        return [words] if is_used and field in supported and getattr(plan, field) not in supported[field] else []

    operators = "+".join(plan.recompute_operators)
    supported_operators = {frozenset(names) for names in supported.get("recompute_operators", ())}
    chooses_operators = "recompute_operators" in RECOMPUTES[plan.recompute].reads
    lacks_operators = supported_operators and frozenset(plan.recompute_operators) not in supported_operators
    return (
        *lacking("schedule", say("schedule {schedule}", schedule=plan.schedule), plan.pp > 1),
        *lacking("zero", f"ZeRO-{plan.zero}"),
        *lacking("sequence_parallel", say("sequence parallel")),
        *lacking("cp", say("context parallel")),
        *lacking("cp_method", say("context parallel by {method}", method=plan.cp_method), plan.cp > 1),
        *lacking("recompute", say("recomputation {policy}", policy=plan.recompute)),
        *([say("recomputation of {operators}", operators=operators)] if lacks_operators and chooses_operators else ()),
        *lacking("zero_ranks", say("shards over a part of the replicas")),
        *lacking("layout", say("stages of uneven layers")),
        *lacking("offload_optimizer", _hosted("optimizer state")),
        *lacking("offload_parameters", _hosted("parameters")),
        *lacking("offload_activations", _hosted("activations")),
    )


def _hosted(state: str) -> str:
    return say("{state} in host memory", state=fixed(state))
