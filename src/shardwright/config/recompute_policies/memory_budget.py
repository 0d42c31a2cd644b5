"""Recomputation until activations fit a budget, at the least time (memory/recompute_budget.py)."""

from typing import Any

from shardwright.config.phrase import say
from shardwright.config.recompute_facts import RecomputeFacts


def _faults(plan: Any, num_layers: int, mtp_layers: int) -> list[str]:
    faults = list[str]()
    if plan.memory_limit_gib == 0:
        faults.append(
            say(
                'plan.recompute = "budget" needs a limit; set plan.memory_limit_gib to the GiB of a rank that '
                "activations may take"
            )
        )
    if mtp_layers:
        faults.append(
            say(
                'plan.recompute = "budget" weighs the layers of a stage, and those of model.mtp_layers '
                '{mtp_layers} keep more than a layer; use "full" or "selective", or name the layers in '
                "plan.recompute_layers",
                mtp_layers=mtp_layers,
            )
        )
    return faults


FACTS = RecomputeFacts(
    name="budget",
    place=50,
    does="what fits memory_limit_gib at the least time",
    chosen_by="shardwright.memory.recompute_budget:chosen_layers",
    reads=frozenset({"memory_limit_gib"}),
    faults=_faults,
    not_searched="it is solved for one plan",
)
