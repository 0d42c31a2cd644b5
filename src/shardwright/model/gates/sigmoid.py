"""The gate of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoids, and a bias that keeps experts evenly used.

The bias affects the choice but not the weights, so it balances experts without a loss that acts on the gate (Wang et
al. 2024, arXiv 2408.15664). It follows the counts of each step (model/router_state.py).

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest
from shardwright.model.gates.within_groups import within_groups


class Sigmoid(Gate):
    """The gate. The score of an expert does not depend on the logits of other experts."""

    def score(self, logits_TE: Tensor) -> Tensor:
        """The sigmoids of the logits."""
        return logits_TE.sigmoid()

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The experts with the largest biased scores, in some of the groups if the choice is limited to groups."""
        preference_TE = within_groups(scores_TE + known.bias_E, self.spec)
        return all_hold(largest(preference_TE, self.spec.num_chosen), preference_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The scores without the bias, divided by their sum if the spec says so."""
        weights_TK = scores_TE.gather(-1, experts_TK)
        return (add_to_one(weights_TK) if self.spec.normalise else weights_TK) * self.spec.routed_scaling
