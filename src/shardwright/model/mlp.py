"""The MLP of a block: up, activation, down; or gated (Shazeer 2020, arXiv 2002.05202): act(gate) x up, then down.

Shape suffixes: S sequence, B batch, H hidden, F = ffn / tp inner width; s is S / tp under sequence parallel.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from shardwright.parallel.parameter import sharded
from shardwright.parallel.tensor import ColumnLinear, Cut, RowLinear
from shardwright.spec.model import ModelSpec
from shardwright.spec.parameters import residual_std

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu-tanh": partial(functional.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Gate and up are one matrix of full shape [2, ffn, H], so that they share their input's collective."""

    def __init__(self, spec: ModelSpec, cut: Cut) -> None:
        super().__init__()
        self.gated = spec.gated_mlp
        self.activation = ACTIVATIONS[spec.activation]
        inner = (2, spec.ffn_size) if self.gated else (1, spec.ffn_size)
        self.up = ColumnLinear(spec.hidden, inner, 1, cut, spec.init_std)
        self.up_bias = sharded(inner, 1, cut.tp, "zeros") if spec.bias else None
        self.down = RowLinear(
            spec.ffn_size,
            spec.hidden,
            spec.bias,
            cut,
            residual_std(spec.init_std, spec.layers),
        )

    def forward(self, x_sBH: Tensor) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        up = self.up(x_sBH)
        if self.up_bias is not None:
            up = up + self.up_bias.flatten()
        if not self.gated:
            return self.down(self.activation(up))
        gate_SBF, up_SBF = up.chunk(2, dim=-1)
        return self.down(self.activation(gate_SBF) * up_SBF)
