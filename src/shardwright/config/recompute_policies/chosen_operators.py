"""Recomputation of some operators of each layer. Korthikanti et al. 2022 (arXiv 2205.05198, section 5).

A search tries the attention core, as in that paper; elementwise operators (norms and activations); and all operators
but the products that end the halves of a layer.
"""

from typing import Any

from shardwright.config.phrase import say
from shardwright.config.recompute_facts import RecomputeFacts, every_so_many
from shardwright.config.recompute_policy import OPERATORS, policy_faults


def _faults(plan: Any, num_layers: int, mtp_layers: int) -> list[str]:
    faults = list[str]()
    if not plan.recompute_operators:
        faults.append(
            say(
                'plan.recompute = "selective" without plan.recompute_operators recomputes nothing; name some of '
                '{operators}, or use plan.recompute = "none"',
                operators=OPERATORS,
            )
        )
    return faults + policy_faults("plan.recompute_operators", frozenset(plan.recompute_operators))


FACTS = RecomputeFacts(
    name="selective",
    place=40,
    does="the operators of recompute_operators",
    layers=lambda plan, num_layers: every_so_many(plan, num_layers, frozenset(plan.recompute_operators)),
    reads=frozenset({"recompute_operators", "recompute_every"}),
    faults=_faults,
    searched=({}, {"recompute_operators": ("norm", "activation")}, {"recompute_operators": OPERATORS}),
    search_place=20,
    is_simple=True,
)
