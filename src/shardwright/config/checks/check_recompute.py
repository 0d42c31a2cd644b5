"""Check that the fields of a plan about recomputation agree."""

from functools import cache

from shardwright.config.phrase import any_of, say
from shardwright.config.plan import PlanSpec
from shardwright.config.recompute_facts import RECOMPUTES, optional_recompute_fields


def recompute_faults(plan: PlanSpec, layers: int, mtp_layers: int = 0) -> list[str]:
    """Contradictions among the fields about recomputation."""
    facts = RECOMPUTES[plan.recompute]
    unread = [name for name in optional_recompute_fields() if name not in facts.reads]
    return [
        *facts.faults(plan, layers, mtp_layers),
        *(_unread(plan, name) for name in unread if getattr(plan, name) != _default(name)),
    ]


@cache
def _default(name: str) -> object:
    """The value of a plan's field that nobody sets. Nobody may change it."""
    return PlanSpec.model_fields[name].get_default(call_default_factory=True)


def _unread(plan: PlanSpec, name: str) -> str:
    """Sentence on a field that is set and not read, with the policies that read it."""
    is_flag = isinstance(getattr(plan, name), bool)
    return say(
        "{purpose} is {policy}; use plan.recompute = {readers}{other_way}",
        purpose=_purpose(plan, name),
        policy=repr(plan.recompute),
        readers=any_of([f'"{facts.name}"' for facts in RECOMPUTES.values() if name in facts.reads]),
        other_way=say(", or plan.{name} = false", name=name) if is_flag else "",
    )


def _purpose(plan: PlanSpec, name: str) -> str:
    """The first half of a sentence about a field that the plan's policy does not read."""
    purposes = {
        "recompute_operators": say("plan.recompute_operators is for selective recomputation, and plan.recompute"),
        "recompute_every": say(
            "plan.recompute_every {value} needs something to recompute, and plan.recompute", value=plan.recompute_every
        ),
        "memory_limit_gib": say(
            'plan.memory_limit_gib {value:g} is for plan.recompute = "budget", and that', value=plan.memory_limit_gib
        ),
        "recompute_layers": say('plan.recompute_layers is for plan.recompute = "layers", and that'),
        "offload_activations": say(
            "plan.offload_activations sends away the one tensor that a recomputed layer keeps, and plan.recompute"
        ),
    }
    return purposes.get(name) or say("plan.{name} is for other policies, and plan.recompute", name=name)
