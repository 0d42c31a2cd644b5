"""AdamW whose two moments are kept in bf16, and computed with in float32 (DeepSeek-AI 2024, DeepSeek-V3, arXiv
2412.19437, section 3.3.3).

In a step a moment is widened, moves as in float32, and updates its weight; only then it is rounded to the nearest bf16
number. bf16 has 8 bits, so numbers between 2^e and 2^(e+1) are 2^(e-7) apart, and what a step changes by less than half
of that, 0.2 to 0.4 % of the moment, is lost. With a decay of 0.95 a step covers 5 % of the way from the moment to the
squared gradient: it stands still where that is within 4 to 8 % of it, which is 2 to 4 % of its root. With a decay of
0.999 it covers 0.1 %, and a moment that should fall stands still for ever: decays like this are refused
(config/checks/check_moments.py).
"""

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

# Elements that are widened at a time. In float32 both moments of a block are 4 MiB, which stay in a cache, or on a GPU
# 64 MiB, which make kernels that take far longer than their launch.
BLOCKS = {"cpu": 1 << 19, "cuda": 1 << 23}


class Bf16MomentsAdamW(torch.optim.Optimizer):
    """AdamW with torch's arithmetic and states of torch's names, of which the moments are in bf16."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)  # without the guard, which imports the compiler

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        """`groups` of weights in float32, each with its `weight_decay`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "moments": torch.bfloat16})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=group["moments"], memory_format=torch.preserve_format)
        state["step"] += 1
        size, gradient, (beta1, beta2) = BLOCKS[weight.device.type], weight.grad, group["betas"]
        assert gradient is not None
        first, second = torch.empty(2, min(size, weight.numel()), device=weight.device)
        for start in range(0, weight.numel(), size):
            here = slice(start, min(start + size, weight.numel()))
            moments = state["exp_avg"][here], state["exp_avg_sq"][here]
            wide = [of[: here.stop - start].copy_(moment) for of, moment in zip((first, second), moments, strict=True)]
            torch._fused_adamw_(
                [weight[here]], [gradient[here]], wide[:1], wide[1:], [], [state["step"]],
                lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False,
            )  # fmt: skip
            for moment, values in zip(moments, wide, strict=True):
                moment.copy_(values)
