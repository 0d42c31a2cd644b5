"""Experts choose tokens, the same number each. Zhou et al. 2022 (arXiv 2202.09368, section 3.2).

No expert is ever idle and none overflows, but a token may get many experts or none. An expert compares all tokens of a
microbatch, later ones too: a token's output then depends a little on tokens after it, which the authors' encoders did
not mind and a decoder that writes token by token does not have.

Shape suffixes: T tokens, K choices of a token, E experts, C tokens of an expert.
"""

import torch
from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, by_preference, order_of
from shardwright.parallel.expert.counting import HostNumbers


class ExpertChoice(Gate):
    """K is the most experts that one of the tokens got; a token with fewer has choices that do not hold."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """For each expert the tokens with the largest scores; among equals the earlier. Filling is behind all."""
        asked_TE = scores_TE if known.real_T is None else scores_TE.masked_fill(~known.real_T[:, None], -1.0)
        capacity = self.spec.capacity(scores_TE.shape[0] if known.real_T is None else known.num_real)
        assert capacity is not None, "experts that choose have a capacity"
        tokens_EC = order_of(asked_TE.t())[:, :capacity]
        taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, tokens_EC.t(), True)
        # The host has to know the most, for what comes next is so wide. While it waits the experts are put in order.
        most = HostNumbers(taken_TE.sum(dim=-1).max().reshape(1), known.streams)
        order_TE = by_preference(taken_TE.float())
        # In a dry run nobody knows who got most: every token gets as many.
        num_choices = max(1, most.read([self.spec.num_chosen] if taken_TE.is_meta else None)[0])
        experts_TK = order_TE[:, :num_choices].contiguous()
        return Choice(experts_TK, taken_TE.gather(-1, experts_TK), scores_TE)
