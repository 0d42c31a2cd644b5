"""The state of a router from step to step, and its counts in the running step.

The state changes once a step, by the counts of all ranks (train/router_update.py). Within a step it is constant, so a
microbatch is routed alike on every rank, in any order and in recompute.

Shape suffixes: T tokens, K choices of a token, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import Choice
from shardwright.parallel.expert.grouped_linear import count_each
from shardwright.sharding.routing_counts import COUNTED, counts_pairs, size_of_totals


@dataclass(frozen=True)
class Totals:
    """Counts over real tokens, float64: the number of tokens, of choices dropped for lack of capacity, and of tokens
    that no expert computed; the sum over tokens of the entropy of their scores, and over microbatches of the two
    losses; how often each expert was chosen, and how often as first; how often two experts were chosen together, None
    if that is not counted."""

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
        """The totals in a vector of `size_of_totals` numbers, as views of it."""
        E, has_pairs = spec.experts, counts_pairs(spec)
        scalars, chosen_E, first_E, pairs = numbers.split([len(COUNTED), E, E, E * E if has_pairs else 0])
        fields = dict(zip(COUNTED, scalars.unbind(), strict=True))
        return cls(**fields, chosen_E=chosen_E, first_E=first_E, together_EE=pairs.view(E, E) if has_pairs else None)


class RouterState(nn.Module):
    """Buffers: the bias of each expert, its share of all choices in the previous step, the running counts of experts
    chosen together, and the counts of the running step."""

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
        width = E if spec.gate_facts.counts_pairs else 0
        self.register_buffer("together_EE", torch.zeros(width, width))
        self.register_buffer("seen", torch.zeros(size_of_totals(spec), dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def observe(
        self, gate_choice: Choice, final: Choice, likelihood_TE: Tensor, losses: Tensor, real_T: Tensor | None
    ) -> None:
        """Count the choices of some tokens: `gate_choice` as the gate made them, `final` after the capacity was
        applied. Add the balance loss and the z-loss, [2]. Tokens that are not real are left out."""
        totals, E = Totals.of(self.seen, self.spec), self.spec.experts
        unserved_T = ~final.holds_TK.any(dim=-1)
        entropy_T = torch.special.entr(likelihood_TE).sum(dim=-1, dtype=torch.float64)
        if real_T is not None:
            unserved_T, entropy_T = unserved_T & real_T, entropy_T.masked_fill(~real_T, 0.0)
        totals.tokens.add_(likelihood_TE.shape[0] if real_T is None else real_T.sum())
        totals.dropped.add_(gate_choice.holds_TK.sum() - final.holds_TK.sum())
        totals.unserved.add_(unserved_T.sum())
        totals.entropy.add_(entropy_T.sum())
        totals.balance_loss.add_(losses[0])
        totals.z_loss.add_(losses[1])
        experts_TK = gate_choice.experts_TK.masked_fill(~gate_choice.holds_TK, E)
        totals.chosen_E.add_(count_each(experts_TK, E))
        totals.first_E.add_(count_each(experts_TK[:, 0], E))
        if totals.together_EE is not None:
            chosen_TKE = functional.one_hot(gate_choice.experts_TK, E) * gate_choice.holds_TK[..., None]
            chosen_TE = chosen_TKE.sum(dim=1).float()  # 0 or 1, so products and sums are exact
            totals.together_EE.add_((chosen_TE.t() @ chosen_TE).fill_diagonal_(0))

    def take_seen(self) -> Tensor:
        """Return the counts since the last call, and set them to zero."""
        counts = self.seen.clone()
        self.seen.zero_()
        return counts

    @torch.no_grad()
    def learn(self, totals: Totals) -> None:
        """Update the state by the counts of all ranks in a step.

        The bias of each expert moves by a fixed amount towards the mean count (Wang et al. 2024, arXiv 2408.15664,
        algorithm 1).
        """
        spec = self.spec
        if spec.bias_update:
            error_E = totals.chosen_E.mean() - totals.chosen_E
            self.bias_E += spec.bias_update * error_E.sign().to(self.bias_E.dtype)
        counts_E, num_choices = (totals.first_E, 1) if spec.aux_loss == "gshard" else (totals.chosen_E, spec.num_chosen)
        # A step without real tokens leaves the shares as they are.
        shares_E = (counts_E / (totals.tokens * num_choices)).to(self.shares_E.dtype)
        self.shares_E.copy_(torch.where(totals.tokens > 0, shares_E, self.shares_E))
        if spec.gate_facts.counts_pairs:
            assert totals.together_EE is not None
            self.together_EE.mul_(spec.co_activation_decay).add_(totals.together_EE)
