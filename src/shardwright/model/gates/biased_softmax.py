"""The gate of ERNIE 4.5 (Baidu 2025): probabilities, and a bias that keeps experts evenly used, as in `sigmoid`.

The bias affects the choice but not the weights.

Shape suffixes: T tokens, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Known
from shardwright.model.gates.softmax import Softmax


class BiasedSoftmax(Softmax):
    """Top-k of a softmax plus a bias, weighed by the softmax alone."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The experts with the largest biased probabilities, in some of the groups if the choice is limited to
        groups."""
        return super().choose_freely(scores_TE + known.bias_E, known)
