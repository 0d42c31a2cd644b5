"""The MLP of a block: up, activation, down; or gated (Shazeer 2020, arXiv 2002.05202): act(gate) x up, then down.

The tensors that its backward keeps are listed in memory/activations.py; their sizes are in memory/kept_tensors.py
(InnerMlp) and layers/layer_tensors.py (MlpTensors).

Shape suffixes: S sequence, B batch, H hidden, F = ffn / tp inner width; s is S / tp under sequence parallel.
"""

from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.model.activation import activate_and_keep, activate_gated
from shardwright.parallel.recompute.region import Chain
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, RowLinear
from shardwright.parallel.tensor.low_rank import adapter_of
from shardwright.parallel.tensor.parameter import sharded
from shardwright.sharding.stage_parameters import residual_std


class MLP(nn.Module):
    """Gate and up are one matrix of full shape [2, ffn, H], so that they share their input's collective.

    The operators are called one by one, since a block may recompute some of them: `up`, [s, B, H] to [S, B, F], or to
    [gate | up], [S, B, 2 F], if gated; `activate`; and `down`, [S, B, F] to [s, B, H].
    """

    def __init__(self, spec: ModelSpec, sharding: LayerSharding, width: int = 0, owns_input: bool = True) -> None:
        """`width` is the inner width of shared experts, 0 for the MLP of a dense layer. `owns_input`: no other operator
        keeps the input of `up`."""
        super().__init__()
        shape = shape_of(spec)
        up_matrix, down_matrix = shape.shared_matrices if width else shape.mlp_matrices
        width = width or spec.ffn_size
        self.gated = spec.gated_mlp
        self.activation = spec.activation
        inner = (2, width) if self.gated else (1, width)
        self.up = ColumnLinear(spec.hidden, inner, 1, sharding, std=spec.init_std, owns_input=owns_input)
        self.up_bias = sharded(inner, 1, sharding.tp, "zeros") if spec.has_mlp_bias else None
        std = residual_std(spec.init_std, spec.layers)
        self.down = RowLinear(width, spec.hidden, spec.has_mlp_bias, sharding, std=std)
        self.up.adapter = adapter_of(spec.adapter, up_matrix, sharding)
        self.down.adapter = adapter_of(spec.adapter, down_matrix, sharding)

    def end_chain(self, chain: Chain) -> Tensor:
        """[s, B, H] to [s, B, H], as the last operators of a chain."""
        return chain.product("up", self.up).then("activation", self.activate).into(self.down)

    def activate(self, up: Tensor) -> Tensor:
        """Bias, activation and gating: from the result of `up` to [S, B, F]."""
        if self.up_bias is not None:
            up = up + self.up_bias.flatten()
        return (activate_gated if self.gated else activate_and_keep)(up, self.activation)
