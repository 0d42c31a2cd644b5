"""A gate that is described and computed in this file alone, as one that somebody adds: the experts after the best one.

A token gets the k most probable experts but for the first; their probabilities are divided by their sum.
"""

from typing import Any

from torch import Tensor

from shardwright.config.gate_facts import GATES, GateFacts
from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest
from support.ranks import _on_mesh

NAME = "runners-up"


class RunnersUp(Gate):
    """The best expert is left out."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The second to the last of k + 1."""
        experts_TK = largest(scores_TE, self.spec.num_chosen + 1)[:, 1:].contiguous()
        return all_hold(experts_TK, scores_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Probabilities of the chosen, divided by their sum."""
        return add_to_one(scores_TE.gather(-1, experts_TK)) * self.spec.routed_scaling


FACTS = GateFacts(name=NAME, place=15, rule="support.added_gate:RunnersUp", adds_to_one="always")


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a gate."""
    with GATES.also(FACTS):
        return _on_mesh(rank, store, *args)
