"""The gate of GShard: the best expert, and at random the second best. Lepikhin et al. 2021 (arXiv 2006.16668,
algorithm 1).

The two weights add up to one. The second choice holds with a probability of twice its weight: an expert that adds
little is rarely worth the communication. The random number is a hash of the token's place in the run (counter_rng.py).
In an evaluation there are no random numbers, and the second choice always holds.

Shape suffixes: T tokens, K = 2, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest


class GShard(Gate):
    """The gate. If the second choice of a token does not hold, the weight of its first choice stays the same."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The two experts with the largest scores, the second one if the random number allows it."""
        choice = all_hold(largest(scores_TE, 2), scores_TE)
        if known.draws_T is not None:
            second_T = add_to_one(scores_TE.gather(-1, choice.experts_TK))[:, 1]
            choice.holds_TK[:, 1] = 2.0 * second_T > known.draws_T
        return choice

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probabilities, divided by their sum."""
        return add_to_one(scores_TE.gather(-1, experts_TK)) * self.spec.routed_scaling
