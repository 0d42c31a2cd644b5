"""The plain gate: the most probable experts. Shazeer et al. 2017 (arXiv 1701.06538, section 2.1).

Weights are the probabilities of the chosen experts, as they are (DeepSeek-V2, Qwen2-MoE) or divided by their sum
(Qwen3-MoE). Mixtral (arXiv 2401.04088, section 2.1) takes the softmax over the logits of the chosen experts, which is
the same number but for rounding.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest
from shardwright.model.gates.within_groups import within_groups


class Softmax(Gate):
    """Top-k of a softmax, in some of the groups if the choice is limited to groups."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The experts with the largest probabilities."""
        preference_TE = within_groups(scores_TE, self.spec)
        return all_hold(largest(preference_TE, self.spec.num_chosen), preference_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probabilities among all experts, or among the chosen."""
        if self.spec.softmax_over == "chosen":
            weights_TK = logits_TE.gather(-1, experts_TK).softmax(dim=-1)
        else:
            weights_TK = scores_TE.gather(-1, experts_TK)
            weights_TK = add_to_one(weights_TK) if self.spec.normalise else weights_TK
        return weights_TK * self.spec.routed_scaling
