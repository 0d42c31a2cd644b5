"""The softmax of the logits of some tokens and its gradient, each one pass over the logits on CUDA.

Between the two, sums cross the ranks that share the vocabulary (loss.py). On a CPU the first pass leaves exponentials
in the memory of the logits, which the second takes up. A kernel reads logits both times instead: an exponential costs
nothing beside memory. Where logits are capped the second needs them, and so a CPU leaves them and takes some rows at a
time.

Shape suffixes: T tokens, V rows of the vocabulary on this rank. All numbers are float32, but the gradient may be in 16
bits.
"""

import torch
from torch import Tensor

from shardwright.precision.fused_operator import fused_operator

_ELEMENTS = 1 << 18  # of some rows of logits, 1 MiB


def exponential_sums(logits_TV: Tensor, largest_T: Tensor, keeps: bool, sums_T: Tensor) -> None:
    """Put the sum of exp(logit - largest) into `sums_T`. May leave the exponentials in `logits_TV` unless it `keeps`
    these."""
    _exponential_sums(logits_TV, largest_T, keeps, sums_T)


def softmax_gradient(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, cap: float,
    gradient_TV: Tensor,
) -> None:  # fmt: skip
    """Put exp(logit - largest) x factor into `gradient_TV`, less `of_targets_T` in row `rows_T` of each token; where
    logits are capped softly, times 1 - (logit / cap)^2.

    `left_TV` is what `exponential_sums` left of the logits, which it kept if there is a cap; it is overwritten, and may
    be `gradient_TV` itself.
    """
    _softmax_gradient(left_TV, largest_T, factors_T, rows_T, of_targets_T, cap, gradient_TV)


def _sums_in_turn(logits_TV: Tensor, largest_T: Tensor, keeps: bool, sums_T: Tensor) -> None:
    if not keeps:
        torch.sum(logits_TV.sub_(largest_T[:, None]).exp_(), dim=-1, out=sums_T)
        return
    for rows in _some_rows(logits_TV):
        torch.sum((logits_TV[rows] - largest_T[rows, None]).exp_(), dim=-1, out=sums_T[rows])


def _sums_at_once(logits_TV: Tensor, largest_T: Tensor, keeps: bool, sums_T: Tensor) -> None:
    sums_T.copy_((logits_TV - largest_T[:, None]).exp().sum(dim=-1))


def _gradient_in_turn(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, cap: float,
    gradient_TV: Tensor,
) -> None:  # fmt: skip
    if not cap:
        left_TV.mul_(factors_T[:, None]).scatter_add_(-1, rows_T[:, None], -of_targets_T[:, None])
        if gradient_TV.dtype != left_TV.dtype:
            gradient_TV.copy_(left_TV)
        return
    for rows in _some_rows(left_TV):
        softmax = (left_TV[rows] - largest_T[rows, None]).exp_().mul_(factors_T[rows, None])
        softmax.scatter_add_(-1, rows_T[rows, None], -of_targets_T[rows, None])
        gradient_TV[rows] = softmax.mul_(_slope(left_TV[rows], cap))


def _gradient_at_once(
    left_TV: Tensor, largest_T: Tensor, factors_T: Tensor, rows_T: Tensor, of_targets_T: Tensor, cap: float,
    gradient_TV: Tensor,
) -> None:  # fmt: skip
    numbers_V = torch.arange(left_TV.shape[-1], dtype=torch.int32, device=left_TV.device)
    is_target_TV = numbers_V == rows_T.to(torch.int32)[:, None]
    softmax_TV = (left_TV - largest_T[:, None]).exp() * factors_T[:, None]
    found_TV = softmax_TV - torch.where(is_target_TV, of_targets_T[:, None], 0.0)
    gradient_TV.copy_(found_TV * _slope(left_TV, cap) if cap else found_TV)


def _slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative of cap x tanh(x / cap), by what that gave."""
    return 1 - (capped / cap).square()


def _some_rows(x_TV: Tensor) -> list[slice]:
    """The rows of x, some at a time."""
    num_rows = max(1, _ELEMENTS // x_TV.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(x_TV), num_rows)]


_exponential_sums = fused_operator(
    "exponential_sums(Tensor(a!) logits, Tensor largest, bool keeps, Tensor(b!) sums) -> ()",
    _sums_in_turn,
    _sums_at_once,
)
_softmax_gradient = fused_operator(
    "softmax_gradient(Tensor(a!) left, Tensor largest, Tensor factors, Tensor rows, Tensor of_targets, float cap, "
    "Tensor(b!) gradient) -> ()",
    _gradient_in_turn,
    _gradient_at_once,
)
