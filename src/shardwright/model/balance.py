"""Losses that keep experts evenly used and the gate's logits small.

The loss of Switch (Fedus et al. 2022, arXiv 2101.03961, equations 4 to 6) is E sum_e f_e P_e: f_e is the share of all
choices that name expert e, P_e the mean of its probability. The minimum, 1, is at even f and P. f is a count and has no
gradient; P has one, which moves tokens away from experts that are often chosen. The loss of GShard (Lepikhin et al.
2021, arXiv 2006.16668, algorithm 1) is 1/E sum_e f_e P_e, where f counts only first choices.

Scope "global" takes f from the counts of the previous optimizer step. The counts of the running step are complete only
after its last forward, long after the first backward; partial counts would depend on the schedule and the number of
microbatches, and so on the plan. In the first step f is even.

Each loss is a mean over a microbatch, as the main loss is, and its gradient takes the same factor. So it has the same
weight however a batch is split. A rank computes its part of P, from the scores of its own tokens.

Filling does not count: f and P are of real tokens. A microbatch, and in scope "sequence" a sample, has a weight in
proportion to its real tokens: sums of P are divided by all its positions here, and the factor of the gradients divides
by the share of real tokens in the global batch (train/train_step.py).

Shape suffixes: T tokens of this rank, B samples of the microbatch, s positions on this rank, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.config.moe import MoeSpec


@dataclass(frozen=True)
class Chosen:
    """The number of times that real tokens of each sample chose each expert, [B, E], and the number of these tokens,
    [B], both over all ranks."""

    counts_BE: Tensor
    tokens_B: Tensor


def balance_loss(
    likelihood_sBE: Tensor, chosen: Chosen | None, shares_E: Tensor, sequence: int, spec: MoeSpec
) -> Tensor:
    """This rank's part of the loss of one microbatch, times its coefficient.

    `likelihood_sBE` are scores that add up to one for each token, and are 0 for filling. Scope "global" uses
    `shares_E`, the shares of the previous step, instead of `chosen`. A sample has `sequence` positions.
    """
    num_choices = 1 if spec.aux_loss == "gshard" else spec.num_chosen
    mean_BE = likelihood_sBE.sum(dim=0) / sequence
    if spec.aux_scope != "sequence":
        mean_BE = mean_BE.mean(dim=0, keepdim=True)
    if spec.aux_scope == "global":
        share_BE = shares_E[None]
    else:
        assert chosen is not None
        counts_BE, tokens_B = chosen.counts_BE, chosen.tokens_B
        if spec.aux_scope == "microbatch":
            counts_BE, tokens_B = counts_BE.sum(dim=0, keepdim=True), tokens_B.sum(dim=0, keepdim=True)
        share_BE = counts_BE / (tokens_B.clamp(min=1) * num_choices)[:, None]
    factor = 1.0 / spec.experts if spec.aux_loss == "gshard" else float(spec.experts)
    return (share_BE * mean_BE).sum(dim=-1).mean() * (spec.aux_coefficient * factor)


def z_loss(logits_TE: Tensor, real_T: Tensor | None, num_positions: int, spec: MoeSpec) -> Tensor:
    """This rank's part of the mean over a microbatch of logsumexp(logits)^2 (Zoph et al. 2022, arXiv 2202.08906,
    equation 5), times its coefficient. Filling counts as 0."""
    squares_T = logits_TE.logsumexp(dim=-1).square()
    if real_T is not None:
        squares_T = squares_T.masked_fill(~real_T, 0.0)
    return squares_T.sum() * (spec.z_coefficient / num_positions)


def add_losses(weights_TK: Tensor, losses: Tensor, factor: float) -> Tensor:
    """The weights, with losses attached to their graph: the backward also computes the gradients of losses x factor."""
    return _AddLosses.apply(weights_TK, losses, factor)


class _AddLosses(torch.autograd.Function):
    """Forward: returns the weights. Backward: passes on their gradient, and starts the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, losses: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.empty_loss = factor, losses.new_empty(())
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.empty_loss, ctx.factor), None
