"""The plain gate: the most probable experts. Shazeer et al. 2017 (arXiv 1701.06538, section 2.1).

Weights are the probabilities of the chosen, as they are (DeepSeek-V2, Qwen2-MoE), or divided by their sum (Qwen3-MoE).
Mixtral (arXiv 2401.04088, section 2.1) takes the softmax over the chosen ones' logits; that is the same number by
another way of rounding.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest
from shardwright.model.gates.within_groups import within_groups


class Softmax(Gate):
    """Top-k of a softmax, in some of the groups if they are limited."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The largest."""
        preference_TE = within_groups(scores_TE, self.spec)
        return all_hold(largest(preference_TE, self.spec.num_chosen), preference_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probabilities among all, or among the chosen."""
        if self.spec.softmax_over == "chosen":
            weights_TK = logits_TE.gather(-1, experts_TK).softmax(dim=-1)
        else:
            weights_TK = scores_TE.gather(-1, experts_TK)
            weights_TK = add_to_one(weights_TK) if self.spec.normalise else weights_TK
        return weights_TK * self.spec.routed_scaling
