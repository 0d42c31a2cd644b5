"""The gate of GShard: the best expert, and at random the second best. Lepikhin et al. 2021 (arXiv 2006.16668,
algorithm 1).

The two weights add up to one. The second choice holds with a probability of twice its weight: one that would add
little is rarely worth the way. What is drawn is a hash of the token's place in the run (counter_rng.py). Where
nothing is drawn, in an evaluation, it always holds.

Shape suffixes: T tokens, K = 2, E experts.
"""

from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest


class GShard(Gate):
    """A token whose second choice does not hold keeps the weight of its first as it is."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The two largest, the second if the draw says so."""
        choice = all_hold(largest(scores_TE, 2), scores_TE)
        if known.draws_T is not None:
            second_T = add_to_one(scores_TE.gather(-1, choice.experts_TK))[:, 1]
            choice.holds_TK[:, 1] = 2.0 * second_T > known.draws_T
        return choice

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probabilities, divided by their sum."""
        return add_to_one(scores_TE.gather(-1, experts_TK)) * self.spec.routed_scaling
