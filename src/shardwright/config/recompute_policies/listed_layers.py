"""Recomputation of the operators that plan.recompute_layers lists for each layer."""

from typing import Any

from shardwright.config.phrase import say
from shardwright.config.recompute_facts import RecomputeFacts
from shardwright.config.recompute_policy import policy_faults


def _faults(plan: Any, num_layers: int, mtp_layers: int) -> list[str]:
    faults = list[str]()
    if len(plan.recompute_layers) != num_layers:
        faults.append(
            say(
                "plan.recompute_layers says for {count} layers what they compute again, and the model has "
                "{num_layers}; give {num_layers} lists",
                count=len(plan.recompute_layers),
                num_layers=num_layers,
            )
        )
    for layer, names in enumerate(plan.recompute_layers):
        faults += policy_faults(f"plan.recompute_layers[{layer}]", frozenset(names))
    return faults


FACTS = RecomputeFacts(
    name="layers",
    place=60,
    does="recompute_layers",
    layers=lambda plan, num_layers: [frozenset(names) for names in plan.recompute_layers],
    reads=frozenset({"recompute_layers"}),
    faults=_faults,
    not_searched="its layers are chosen for one plan",
)
