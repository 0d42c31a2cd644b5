"""The gate of Switch: the one most probable expert, weighed with its probability. Fedus et al. 2022 (arXiv 2101.03961,
section 2.1).

Shape suffixes: T tokens, K = 1, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, all_hold, largest


class Switch(Gate):
    """The gate. The weight is the probability itself, so that the gate learns from the expert's result."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The expert with the largest probability."""
        return all_hold(largest(scores_TE, 1), scores_TE)
