"""The transformer block: attention and an MLP or experts, each added to the residual stream.

Shape suffixes: s tokens of this rank between layers, S within them, B batch, H hidden, F inner width of the MLP.
"""

from functools import partial

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, LAYER, Policy
from shardwright.model.attention import Attention
from shardwright.model.dropout import Dropout
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.latent_attention import LatentAttention
from shardwright.model.mlp import MLP
from shardwright.model.moe_block import MixtureOfExperts
from shardwright.model.norm import Norm
from shardwright.parallel.recompute.region import Chain, forget, run_again
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.stage_parameters import block_name


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)); or with norms of what attention and MLP give,
    in place of these or besides. What is added may be scaled.

    `policy` says what it computes again in the backward instead of keeping it (config/recompute_policy.py).
    """

    def __init__(self, spec: ModelSpec, number: int, cut: LayerSharding, policy: Policy = KEEP_ALL) -> None:
        super().__init__()
        name = block_name(spec, number)
        self.policy, self.cut, self.scale = policy, cut, spec.residual_scale
        before, after = spec.norm_place != "after", spec.norm_place != "before"
        self.attention_norm = Norm(spec, cut) if before else None
        self.attention = LatentAttention(spec, cut) if spec.is_latent else Attention(spec, cut, number)
        self.attention_out_norm = Norm(spec, cut) if after else None
        self.attention_dropout = Dropout(spec, f"{name}.attention", cut)
        self.mlp_norm = Norm(spec, cut) if before and spec.parallel_block != "one-norm" else None
        self.mlp = None if spec.has_experts(number) else MLP(spec, cut)
        self.moe = MixtureOfExperts(spec, name, cut) if spec.has_experts(number) else None
        self.mlp_out_norm = Norm(spec, cut) if after else None
        self.mlp_dropout = Dropout(spec, f"{name}.mlp", cut)

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if LAYER in self.policy:
            return self._forward_forgotten(x_sBH, run)
        x_sBH = self.join(x_sBH, self._attention(x_sBH, run, self.policy))
        return self.join(x_sBH, self._mlp(x_sBH, run, self.policy))

    def join(self, x_sBH: Tensor, y_sBH: Tensor) -> Tensor:
        """Add the result of a half to the residual stream."""
        return x_sBH + y_sBH if self.scale == 1.0 else torch.add(x_sBH, y_sBH, alpha=self.scale)

    def _attention(self, x_sBH: Tensor, run: ForwardPass, policy: Policy) -> Tensor:
        """attention(norm(x)), whose operators are called one by one: some may be computed again."""
        attention = self.attention
        qkv = _normed(Chain(x_sBH, policy), self.attention_norm).product("qkv", attention.project)
        y_sBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out)
        return self.attention_dropout(_normal(y_sBH, self.attention_out_norm), run)

    def _mlp(self, x_sBH: Tensor, run: ForwardPass, policy: Policy) -> Tensor:
        """mlp(norm(x)), or moe(norm(x))."""
        if self.moe is not None:
            y_sBH = self.moe(_normal(x_sBH, self.mlp_norm), run, policy)
        else:
            assert self.mlp is not None
            y_sBH = self.mlp.after(_normed(Chain(x_sBH, policy), self.mlp_norm))
        return self.mlp_dropout(_normal(y_sBH, self.mlp_out_norm), run)

    def _forward_forgotten(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """The block where only its input is kept. All of it is computed again but the down product, which takes part;
        a block with experts, or with a norm of what the MLP gives, ends otherwise, and is computed again to its end."""

        def halfway(x_sBH: Tensor) -> Tensor:
            return self.join(x_sBH, self._attention(x_sBH, run, KEEP_ALL))

        def whole(x_sBH: Tensor) -> Tensor:
            x_sBH = halfway(x_sBH)
            return self.join(x_sBH, self._mlp(x_sBH, run, KEEP_ALL))

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor]:
            x_sBH = halfway(x_sBH)
            assert self.mlp is not None
            return x_sBH, self.mlp.activate(self.mlp.up(_normal(x_sBH, self.mlp_norm)))

        if self.mlp is None or self.mlp_out_norm is not None:
            return run_again(whole, x_sBH, run.convoy)
        (x_sBH,), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self.join(x_sBH, self.mlp_dropout(self.mlp.down(inner_SBF), run))


def _normal(x_sBH: Tensor, norm: Norm | None) -> Tensor:
    return x_sBH if norm is None else norm(x_sBH)


def _normed(chain: Chain, norm: Norm | None) -> Chain:
    return chain if norm is None else chain.then("norm", norm)
