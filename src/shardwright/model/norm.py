"""Normalisation: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450).

Under sequence parallel each tp rank normalises its own tokens, and sees only their part of the weight's gradient.
"""

from torch import Tensor, nn
from torch.nn import functional

from shardwright.parallel.parameter import whole
from shardwright.parallel.tensor import Cut
from shardwright.spec.model import ModelSpec


class Norm(nn.Module):
    """Normalises the last dim."""

    def __init__(self, spec: ModelSpec, cut: Cut) -> None:
        super().__init__()
        self.epsilon = spec.norm_epsilon
        self.weight = whole((spec.hidden,), "ones", summed_over=cut.summed_over)
        is_layernorm = spec.norm == "layernorm"
        self.bias = whole((spec.hidden,), "zeros", summed_over=cut.summed_over) if is_layernorm else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] to [S, B, H]."""
        # Copies, because torch keeps both for the backward: a view would keep the whole buffer that it lies in.
        weight_H = self.weight.clone()
        if self.bias is None:
            return functional.rms_norm(x_SBH, weight_H.shape, weight_H, self.epsilon)
        return functional.layer_norm(x_SBH, weight_H.shape, weight_H, self.bias.clone(), self.epsilon)
