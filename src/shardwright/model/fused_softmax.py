"""The softmax of the logits of some tokens and its gradient, each one pass over the logits on CUDA.

Between the two passes, sums are all-reduced over the ranks that share the vocabulary (loss.py). On a CPU the first pass
leaves exponentials in the memory of the logits, and the second pass reads them. A CUDA kernel reads logits both times:
an exponential costs nothing beside memory traffic. With a soft cap the second pass needs the logits, so a CPU keeps
them and computes some rows at a time.

Shape suffixes: T tokens, V rows of the vocabulary on this rank. All tensors are float32, but the gradient may be
16-bit.
"""

import torch
from torch import Tensor

from shardwright.precision.fused_operator import fused_operator

_ELEMENTS = 1 << 18  # logits in the rows that a CPU computes at a time, 1 MiB


def _sums_in_turn(logits_TV: Tensor, largest_T: Tensor, keeps: bool, sums_T: Tensor) -> None:
    if not keeps:
        torch.sum(logits_TV.sub_(largest_T[:, None]).exp_(), dim=-1, out=sums_T)
        return
    for rows in _some_rows(logits_TV):
        torch.sum((logits_TV[rows] - largest_T[rows, None]).exp_(), dim=-1, out=sums_T[rows])


def _sums_at_once(logits_TV: Tensor, largest_T: Tensor, keeps: bool, sums_T: Tensor) -> None:
    sums_T.copy_((logits_TV - largest_T[:, None]).exp().sum(dim=-1))


def _gradient_in_turn(
    logits_or_exps_TV: Tensor,
    largest_T: Tensor,
    factors_T: Tensor,
    rows_T: Tensor,
    dtargets_T: Tensor,
    cap: float,
    gradient_TV: Tensor,
) -> None:
    if not cap:
        logits_or_exps_TV.mul_(factors_T[:, None]).scatter_add_(-1, rows_T[:, None], -dtargets_T[:, None])
        if gradient_TV.dtype != logits_or_exps_TV.dtype:
            gradient_TV.copy_(logits_or_exps_TV)
        return
    for rows in _some_rows(logits_or_exps_TV):
        softmax = (logits_or_exps_TV[rows] - largest_T[rows, None]).exp_().mul_(factors_T[rows, None])
        softmax.scatter_add_(-1, rows_T[rows, None], -dtargets_T[rows, None])
        gradient_TV[rows] = softmax.mul_(_slope(logits_or_exps_TV[rows], cap))


def _gradient_at_once(
    logits_TV: Tensor,
    largest_T: Tensor,
    factors_T: Tensor,
    rows_T: Tensor,
    dtargets_T: Tensor,
    cap: float,
    gradient_TV: Tensor,
) -> None:
    numbers_V = torch.arange(logits_TV.shape[-1], dtype=torch.int32, device=logits_TV.device)
    is_target_TV = numbers_V == rows_T.to(torch.int32)[:, None]
    softmax_TV = (logits_TV - largest_T[:, None]).exp() * factors_T[:, None]
    uncapped_TV = softmax_TV - torch.where(is_target_TV, dtargets_T[:, None], 0.0)
    gradient_TV.copy_(uncapped_TV * _slope(logits_TV, cap) if cap else uncapped_TV)


def _slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative of cap x tanh(x / cap), from its result `capped`."""
    return 1 - (capped / cap).square()


def _some_rows(x_TV: Tensor) -> list[slice]:
    """Slices that cover the rows of x, each of about `_ELEMENTS` elements."""
    num_rows = max(1, _ELEMENTS // x_TV.shape[1])
    return [slice(first, first + num_rows) for first in range(0, len(x_TV), num_rows)]


# exponential_sums(logits_TV, largest_T, keeps, sums_T): put the sum of exp(logit - largest) into `sums_T`. If it
# `keeps` the logits, `logits_TV` stays as it is; else it may hold the exponentials afterwards.
exponential_sums = fused_operator(
    "exponential_sums(Tensor(a!) logits, Tensor largest, bool keeps, Tensor(b!) sums) -> ()",
    _sums_in_turn,
    _sums_at_once,
)
# softmax_gradient(logits_or_exps_TV, largest_T, factors_T, rows_T, dtargets_T, cap, gradient_TV): put
# exp(logit - largest) x factor into `gradient_TV`, minus `dtargets_T` in row `rows_T` of each token; with a soft cap,
# times 1 - (logit / cap)^2. `logits_or_exps_TV` is the memory of the logits after `exponential_sums`, which kept them
# if there is a cap. It is overwritten, and may be `gradient_TV` itself.
softmax_gradient = fused_operator(
    "softmax_gradient(Tensor(a!) left, Tensor largest, Tensor factors, Tensor rows, Tensor of_targets, float cap, "
    "Tensor(b!) gradient) -> ()",
    _gradient_in_turn,
    _gradient_at_once,
)
