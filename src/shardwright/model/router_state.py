"""The state of a router from step to step, and its counts in the running one.

Memory changes once a step, by what all ranks saw together (train/router_update.py). In between it is constant, so a
microbatch is routed alike wherever and whenever it is computed, in a recomputation too.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import Choice
from shardwright.parallel.expert.counting import count_each
from shardwright.sharding.router_totals import COUNTED, counts_pairs, size_of_totals


@dataclass(frozen=True)
class Totals:
    """Counts over real tokens, float64: their number, choices dropped for want of room, tokens that no expert computed,
    sums over tokens of the entropy of their scores and over microbatches of the two losses; how often each expert was
    chosen, and how often first; and together with which others, if that was counted."""

    tokens: Tensor
    dropped: Tensor
    unserved: Tensor
    entropy: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    chosen_E: Tensor
    first_E: Tensor
    together_EE: Tensor | None

    @classmethod
    def of(cls, numbers: Tensor, spec: MoeSpec) -> "Totals":
        """The totals in a vector of `size_of_totals` numbers: views of it."""
        E, pairs = spec.experts, counts_pairs(spec)
        scalars, chosen_E, first_E, together = numbers.split([len(COUNTED), E, E, E * E if pairs else 0])
        named = dict(zip(COUNTED, scalars.unbind(), strict=True))
        return cls(**named, chosen_E=chosen_E, first_E=first_E, together_EE=together.view(E, E) if pairs else None)


class RouterState(nn.Module):
    """Buffers: the bias of each expert, the share of choices that it had in the step before, and the running counts of
    experts chosen together."""

    bias_E: Tensor
    shares_E: Tensor
    together_EE: Tensor
    seen: Tensor

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__()
        self.spec = spec
        E = spec.experts
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("shares_E", torch.full((E,), 1.0 / E))
        remembered = E if spec.gate_facts.counts_pairs else 0
        self.register_buffer("together_EE", torch.zeros(remembered, remembered))
        self.register_buffer("seen", torch.zeros(size_of_totals(spec), dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def observe(
        self, asked: Choice, final: Choice, likelihood_TE: Tensor, losses: Tensor, real_T: Tensor | None
    ) -> None:
        """Add what became of some tokens: what the gate asked for, and what there was room for; and the balance loss
        and the z-loss, [2]. Tokens that are not real are left out."""
        into, E = Totals.of(self.seen, self.spec), self.spec.experts
        unserved_T, entropy_T = (
            ~final.holds_TK.any(dim=-1),
            torch.special.entr(likelihood_TE).sum(dim=-1, dtype=torch.float64),
        )
        if real_T is not None:
            unserved_T, entropy_T = unserved_T & real_T, entropy_T.masked_fill(~real_T, 0.0)
        into.tokens.add_(likelihood_TE.shape[0] if real_T is None else real_T.sum())
        into.dropped.add_(asked.holds_TK.sum() - final.holds_TK.sum())
        into.unserved.add_(unserved_T.sum())
        into.entropy.add_(entropy_T.sum())
        into.balance_loss.add_(losses[0])
        into.z_loss.add_(losses[1])
        held_TK = asked.experts_TK.masked_fill(~asked.holds_TK, E)
        into.chosen_E.add_(count_each(held_TK, E))
        into.first_E.add_(count_each(held_TK[:, 0], E))
        if into.together_EE is not None:
            chosen_TKE = functional.one_hot(asked.experts_TK, E) * asked.holds_TK[..., None]
            chosen_TE = chosen_TKE.sum(dim=1).float()  # 0 or 1, and products of them: exact
            into.together_EE.add_((chosen_TE.t() @ chosen_TE).fill_diagonal_(0))

    def take_seen(self) -> Tensor:
        """Return the counts since the last call, and begin anew."""
        seen = self.seen.clone()
        self.seen.zero_()
        return seen

    @torch.no_grad()
    def learn(self, totals: Totals) -> None:
        """Remember what all ranks saw in a step.

        The bias of each expert moves by a fixed amount towards the mean count (Wang et al. 2024, arXiv 2408.15664,
        algorithm 1).
        """
        spec = self.spec
        if spec.bias_update:
            error_E = totals.chosen_E.mean() - totals.chosen_E
            self.bias_E += spec.bias_update * error_E.sign().to(self.bias_E.dtype)
        counts_E, num_choices = (totals.first_E, 1) if spec.aux_loss == "gshard" else (totals.chosen_E, spec.num_chosen)
        # A step of filling alone teaches nothing.
        shares_E = (counts_E / (totals.tokens * num_choices)).to(self.shares_E.dtype)
        self.shares_E.copy_(torch.where(totals.tokens > 0, shares_E, self.shares_E))
        if spec.gate_facts.counts_pairs:
            assert totals.together_EE is not None
            self.together_EE.mul_(spec.co_activation_decay).add_(totals.together_EE)
