"""The softmax of the logits of some tokens and its gradient, each one pass over the logits on CUDA.

Between the two, sums cross the ranks that share the vocabulary (loss.py). On a CPU the first pass leaves exponentials
in the memory of the logits, which the second takes up. A kernel reads logits both times instead: an exponential costs
nothing beside memory.

Shape suffixes: T tokens, V rows of the vocabulary on this rank. All numbers are float32, but the gradient may be in 16
bits.
"""

import torch
from torch import Tensor

from shardwright.precision.fused_operator import fused_operator


def exponential_sums(logits_TV: Tensor, largest_T: Tensor, sums_T: Tensor) -> None:
    """Put the sum of exp(logit - largest) into `sums_T`. May leave the exponentials in `logits_TV`."""
    _exponential_sums(logits_TV, largest_T, sums_T)


def softmax_gradient(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, gradient_TV: Tensor
) -> None:
    """Put exp(logit - largest) x factor into `gradient_TV`, less `of_targets_T` in row `rows_T` of each token.

    `left_TV` is what `exponential_sums` left of the logits; it is overwritten, and may be `gradient_TV` itself.
    """
    _softmax_gradient(left_TV, largest_T, factors_T, rows_T, of_targets_T, gradient_TV)


def _sums_in_turn(logits_TV: Tensor, largest_T: Tensor, sums_T: Tensor) -> None:
    torch.sum(logits_TV.sub_(largest_T[:, None]).exp_(), dim=-1, out=sums_T)


def _sums_at_once(logits_TV: Tensor, largest_T: Tensor, sums_T: Tensor) -> None:
    sums_T.copy_((logits_TV - largest_T[:, None]).exp().sum(dim=-1))


def _gradient_in_turn(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, gradient_TV: Tensor
) -> None:
    left_TV.mul_(factors_T[:, None]).scatter_add_(-1, rows_T[:, None], -of_targets_T[:, None])
    if gradient_TV.dtype != left_TV.dtype:
        gradient_TV.copy_(left_TV)


def _gradient_at_once(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, gradient_TV: Tensor
) -> None:
    is_target_TV = torch.arange(left_TV.shape[-1], device=left_TV.device) == rows_T[:, None]
    softmax_TV = (left_TV - largest_T[:, None]).exp() * factors_T[:, None]
    gradient_TV.copy_(softmax_TV - torch.where(is_target_TV, of_targets_T[:, None], 0.0))


_exponential_sums = fused_operator(
    "exponential_sums(Tensor(a!) logits, Tensor largest, Tensor(b!) sums) -> ()", _sums_in_turn, _sums_at_once
)
_softmax_gradient = fused_operator(
    "softmax_gradient(Tensor(a!) left, Tensor largest, Tensor factors, Tensor rows, Tensor of_targets, "
    "Tensor(b!) gradient) -> ()",
    _gradient_in_turn,
    _gradient_at_once,
)
