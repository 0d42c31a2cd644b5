"""Check that the fields of a plan about recomputation agree."""

from shardwright.config.plan import PlanSpec
from shardwright.config.recompute_facts import RECOMPUTES, optional_recompute_fields

# The first half of a sentence about a field that the plan's policy does not read; other fields are only named.
_PURPOSES = {
    "recompute_operators": "plan.recompute_operators is for selective recomputation, and plan.recompute",
    "recompute_every": "plan.recompute_every {value} needs something to recompute, and plan.recompute",
    "memory_limit_gib": 'plan.memory_limit_gib {value:g} is for plan.recompute = "budget", and that',
    "recompute_layers": 'plan.recompute_layers is for plan.recompute = "layers", and that',
    "offload_activations": "plan.offload_activations sends away the one tensor that a recomputed layer keeps, and "
    "plan.recompute",
}
_OTHER = "plan.{name} is for other policies, and plan.recompute"


def recompute_faults(plan: PlanSpec, layers: int, mtp_layers: int = 0) -> list[str]:
    """Contradictions among the fields about recomputation."""
    facts = RECOMPUTES[plan.recompute]
    unread = [name for name in optional_recompute_fields() if name not in facts.reads]
    defaults = {name: PlanSpec.model_fields[name].get_default(call_default_factory=True) for name in unread}
    return [
        *facts.faults(plan, layers, mtp_layers),
        *(_unread(plan, name) for name in unread if getattr(plan, name) != defaults[name]),
    ]


def _unread(plan: PlanSpec, name: str) -> str:
    """Sentence on a field that is set and not read, with the policies that read it."""
    purpose = _PURPOSES.get(name, _OTHER).format(name=name, value=getattr(plan, name))
    readers = " or ".join(f'"{facts.name}"' for facts in RECOMPUTES.values() if name in facts.reads)
    is_flag = isinstance(getattr(plan, name), bool)
    other_way = f", or plan.{name} = false" if is_flag else ""
    return f"{purpose} is {plan.recompute!r}; use plan.recompute = {readers}{other_way}"
