"""Output head and cross entropy over a vocabulary that is split over tp. No rank ever holds a token's full logits.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3): three numbers a token cross the ranks (largest logit, logit of the
target, sum of exponentials) in place of a vocabulary of them.

Shape suffixes: T tokens (S x B), V = rows of the vocabulary on this rank.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, all_reduce, all_reduce_max


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Forward: all-reduces of one max and one pair of sums a token. Backward: nothing moves."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, first_row: int, tp: Axis) -> Tensor:
        ctx.dtype = logits_TV.dtype
        logits_TV = logits_TV.float()
        largest_T = all_reduce_max(logits_TV.amax(dim=-1), tp)
        shifted_TV = logits_TV.sub_(largest_T[:, None])  # nobody needs the logits afterwards
        rows_T = targets_T - first_row
        elsewhere_T = (rows_T < 0) | (rows_T >= logits_TV.shape[-1])
        rows_T = rows_T.masked_fill(elsewhere_T, 0)
        target_T = shifted_TV.gather(-1, rows_T[:, None]).squeeze(-1).masked_fill(elsewhere_T, 0.0)
        exponentials_TV = shifted_TV.exp_()
        target_T, total_T = all_reduce(torch.stack((target_T, exponentials_TV.sum(dim=-1))), tp)
        softmax_TV = exponentials_TV.div_(total_T[:, None])
        ctx.save_for_backward(softmax_TV, rows_T, elsewhere_T)
        return total_T.log() - target_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, rows_T, elsewhere_T = ctx.saved_tensors
        gradient_TV = softmax_TV  # nobody needs it afterwards
        here_T = torch.where(elsewhere_T, 0.0, 1.0)
        gradient_TV.scatter_add_(-1, rows_T[:, None], -here_T[:, None])
        return gradient_TV.mul_(grads[0][:, None]).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(logits_TV: Tensor, targets_T: Tensor, first_row: int, tp: Axis) -> Tensor:
    """-log softmax(logits)[target] of each token, [T], float32; `first_row` is this rank's first row of the vocabulary.

    The logits are overwritten. The backward may run once: it reuses its memory.
    """
    return _VocabularyCrossEntropy.apply(logits_TV, targets_T, first_row, tp)
