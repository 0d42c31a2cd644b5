"""A gate whose later choices are limited to experts that are often chosen together with the first.

It follows C2R, collaboration-constrained routing (Zhang et al. 2025, arXiv 2504.01337): experts that work together can
then lie on one device, and a token visits fewer devices. In the paper the lists of partners come from a profile of a
trained model; here they come from a running count of the run itself, updated once a step (model/router_state.py). The
savings depend on the placement of the experts; no more is claimed.

An expert that no token has chosen together with another yet has no list, and the choices after it are free. So all
choices are free in the first step.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

import math

import torch
from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, add_to_one, all_hold, largest


class Correlation(Gate):
    """Top-k of a softmax, of which all but the first are partners of the first."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """The expert with the largest score, and the largest among its partners."""
        partners_EE = partners(known.together_EE, self.spec.num_partners)
        first_T1 = largest(scores_TE, 1)
        # The first stays the most preferred: it is the largest, and a partner of itself.
        preference_TE = scores_TE.masked_fill(~partners_EE[first_T1.squeeze(-1)], -math.inf)
        return all_hold(largest(preference_TE, self.spec.num_chosen), preference_TE)

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The probabilities, divided by their sum if the spec says so."""
        weights_TK = scores_TE.gather(-1, experts_TK)
        return (add_to_one(weights_TK) if self.spec.normalise else weights_TK) * self.spec.routed_scaling


def partners(together_EE: Tensor, num_partners: int) -> Tensor:
    """A mask of the experts that may follow each first choice, with itself: bool [E, E]. In a row without counts all
    may."""
    allowed_EE = torch.zeros_like(together_EE, dtype=torch.bool)
    allowed_EE.scatter_(-1, largest(together_EE.clone().fill_diagonal_(-math.inf), num_partners), True)
    return allowed_EE.fill_diagonal_(True) | (together_EE.clone().fill_diagonal_(0).sum(dim=-1, keepdim=True) == 0)
