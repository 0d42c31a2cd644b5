"""The transformer block: attention and an MLP or experts, each added to the residual stream.

Shape suffixes: s tokens of this rank between layers, B batch, H hidden.
"""

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.attention import Attention
from shardwright.model.dropout import Dropout
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.mlp import MLP
from shardwright.model.moe_block import MixtureOfExperts
from shardwright.model.norm import Norm
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.stage_parameters import block_name


class Block(nn.Module):
    """Transformer block: h = x + attention(norm(x)), then h + mlp(norm(h)).

    The MLP may be a mixture of experts. Norms may stand before attention and MLP, after them, or both. The result of a
    branch may be scaled before it is added. recomputed_block.py has the blocks that recompute in the backward.
    """

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding) -> None:
        """`number` counts the blocks of the model from 0."""
        super().__init__()
        name = block_name(spec, number)
        self.sharding, self.scale = sharding, spec.residual_scale
        norms_before, norms_after = spec.norm_place != "after", spec.norm_place != "before"
        self.attention_norm = Norm(spec, sharding) if norms_before else nn.Identity()
        self.attention = LatentAttention(spec, sharding) if spec.is_latent else Attention(spec, sharding, number)
        self.attention_out_norm = Norm(spec, sharding) if norms_after else nn.Identity()
        self.attention_dropout = Dropout(spec, f"{name}.attention", sharding)
        self.mlp_norm = Norm(spec, sharding) if norms_before and spec.parallel_block != "one-norm" else nn.Identity()
        self.mlp = None if spec.has_experts(number) else MLP(spec, sharding)
        self.moe = MixtureOfExperts(spec, name, sharding) if spec.has_experts(number) else None
        self.mlp_out_norm = Norm(spec, sharding) if norms_after else nn.Identity()
        self.mlp_dropout = Dropout(spec, f"{name}.mlp", sharding)

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        h_sBH = self.add(x_sBH, self.attention_branch(x_sBH, run))
        return self.add(h_sBH, self.mlp_branch(h_sBH, run))

    def add(self, x_sBH: Tensor, y_sBH: Tensor) -> Tensor:
        """Add the result of a branch to the residual stream."""
        return x_sBH + y_sBH if self.scale == 1.0 else torch.add(x_sBH, y_sBH, alpha=self.scale)

    def attention_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """attention(norm(x)), [s, B, H]. Calls are nested, so that no name keeps a tensor alive."""
        attention = self.attention
        y_sBH = attention.out(attention.attend(attention.project(self.attention_norm(x_sBH)), run))
        return self.attention_dropout(self.attention_out_norm(y_sBH), run)

    def mlp_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """mlp(norm(x)) or moe(norm(x)), [s, B, H]."""
        if self.mlp is not None:
            y_sBH = self.mlp.down(self.mlp.activate(self.mlp.up(self.mlp_norm(x_sBH))))
        else:
            assert self.moe is not None, "a block has an MLP or experts"
            y_sBH = self.moe(self.mlp_norm(x_sBH), run)
        return self.mlp_dropout(self.mlp_out_norm(y_sBH), run)
