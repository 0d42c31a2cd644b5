"""Changes of logits before their softmax: a scale (Granite), and a soft cap: cap x tanh(logit / cap) (Gemma 2, arXiv
2408.00118, section 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.precision.fused_operator import fused_operator


@dataclass(frozen=True)
class LogitChange:
    """A scale of logits, and the soft cap on them; 0 is no cap."""

    scale: float = 1.0
    cap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        """The changed logits. In new memory, unless nothing changes."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def change(self, logits_TV: Tensor) -> None:
        """Change logits in place; on CUDA in one pass."""
        if self != LogitChange():
            _change(logits_TV, self.scale, self.cap)


def _change_in_turn(logits_TV: Tensor, scale: float, cap: float) -> None:
    logits_TV.mul_(scale / cap if cap else scale)
    if cap:
        logits_TV.tanh_().mul_(cap)


def _change_at_once(logits_TV: Tensor, scale: float, cap: float) -> None:
    logits_TV.copy_(torch.tanh(logits_TV * (scale / cap)) * cap if cap else logits_TV * scale)


_change = fused_operator(
    "change_logits(Tensor(a!) logits, float scale, float cap) -> ()", _change_in_turn, _change_at_once
)
