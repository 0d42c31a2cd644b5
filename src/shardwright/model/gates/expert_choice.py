"""The gate in which experts choose tokens, each the same number. Zhou et al. 2022 (arXiv 2202.09368, section 3.2).

No expert is idle and none overflows, but a token may get many experts or none. An expert compares all tokens of a
microbatch, later tokens too: a token's output then depends a little on later tokens. The encoders of the paper allow
that, but a decoder that generates token by token does not have the later tokens.

Shape suffixes: T tokens, K choices of a token, E experts, C tokens of an expert.
"""

import torch
from torch import Tensor

from shardwright.model.gates.choice import Choice, Gate, Known, by_preference, order_of
from shardwright.parallel.device_streams import HostNumbers


class ExpertChoice(Gate):
    """K is the largest number of experts of any token; a token with fewer experts has choices that do not hold."""

    def choose_freely(self, scores_TE: Tensor, known: Known) -> Choice:
        """For each expert the tokens with the largest scores; among equals the earlier token. Filling comes last."""
        ranked_TE = scores_TE if known.real_T is None else scores_TE.masked_fill(~known.real_T[:, None], -1.0)
        capacity = self.spec.capacity(scores_TE.shape[0] if known.real_T is None else known.num_real)
        assert capacity is not None, "experts that choose have a capacity"
        tokens_EC = order_of(ranked_TE.t())[:, :capacity]
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, tokens_EC.t(), True)
        # The host needs the largest number, since it is K of the choice. While it waits, the device sorts the experts.
        largest_number = HostNumbers(chosen_TE.sum(dim=-1).max().reshape(1), known.streams)
        order_TE = by_preference(chosen_TE.float())
        # A dry run does not know the number: every token gets `num_chosen` experts.
        num_choices = max(1, largest_number.read([self.spec.num_chosen] if chosen_TE.is_meta else None)[0])
        experts_TK = order_TE[:, :num_choices].contiguous()
        return Choice(experts_TK, chosen_TE.gather(-1, experts_TK), scores_TE)
