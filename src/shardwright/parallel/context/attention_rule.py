"""The rule of a layer's attention: the function of queries, keys and values that every kind of attention computes.

Shape suffixes: S queries of this rank, B batch, N query heads, G key/value heads, Q query heads of each, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.sharding.score_blocks import ALL, KeyReach, most_queries


@dataclass(frozen=True)
class Sinks:
    """A learned score for each head that is in the sum of the softmax but has no value (gpt-oss; Xiao et al. 2023,
    arXiv 2309.17453, section 3.3): attention weights then add up to less than one. `weight` is [G, Q], for the heads of
    a tp rank; `heads` are the heads for which this rank computes attention."""

    weight: PlacedParameter
    heads: slice

    def scores(self) -> Tensor:
        """The scores of the heads of this rank, [N], float32."""
        return self.weight.detach().flatten()[self.heads].float()

    def add_gradient(self, dout_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor) -> None:
        """Add the gradient, given the output and the logarithm of the sum of exponentials, which includes the sink."""
        dot_BNS = (dout_BNSD.float() * out_BNSD).sum(dim=-1)
        share_BNS = (self.scores()[:, None] - lse_BNS).exp_()
        gradient_GQ = torch.zeros(self.weight.shape, dtype=torch.float32, device=dout_BNSD.device)
        gradient_GQ.view(-1)[self.heads] = (share_BNS * dot_BNS).sum(dim=(0, 2)).neg_()
        self.weight.add_gradient(gradient_GQ)


@dataclass(frozen=True)
class AttentionRule:
    """softmax(Q K^T x scale) V over the keys that a query sees: those within `reach`, and, if `is_causal`, not after
    it. Without a `scale` the scale is 1 / sqrt(width).

    A `softcap` limits scores if it is not 0 (capped_attention.py). `slopes_N` times the distance of query and key are
    subtracted from scores (sight.py), and `sinks` add one score to each softmax.
    """

    scale: float | None = None
    is_causal: bool = True
    reach: KeyReach = ALL
    softcap: float = 0.0
    slopes_N: Tensor | None = None
    sinks: Sinks | None = None

    @property
    def makes_scores(self) -> bool:
        """True if tensors of the size of the scores are made for each head."""
        return self.softcap > 0 or self.slopes_N is not None

    def is_plain(self, sequence: int) -> bool:
        """True if torch's own attention computes this rule, for a sequence on one rank."""
        return not self.goes_by_position(sequence) and self.sinks is None

    def goes_by_position(self, sequence: int) -> bool:
        """True if blocks must be of one range of positions each, and of limited size."""
        return self.reach.limits(sequence) or self.makes_scores

    def most_queries(self, q_SBND: Tensor) -> int:
        """The largest number of queries of a block with all keys of a rank; 0 if blocks may have any size."""
        S, B, N, _ = q_SBND.shape
        return most_queries(S, B * N) if self.makes_scores else 0


PLAIN = AttentionRule()
