"""The transformer block: attention and an MLP or experts, each added to the residual stream.

A block may recompute parts of its forward in the backward, instead of keeping the results. A policy
(config/recompute_policy.py) names the operators that are recomputed, or the whole layer. Results and gradients are
bit-identical to those of a block that keeps all (parallel/recompute/region.py).

Shape suffixes: s tokens of this rank between layers, B batch, H hidden, F inner width of the MLP.
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
    """Transformer block: h = x + attention(norm(x)), then h + mlp(norm(h)).

    The MLP may be a mixture of experts. Norms may stand before attention and MLP, after them, or both. The result of a
    branch may be scaled before it is added.
    """

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy = KEEP_ALL) -> None:
        """`number` counts the blocks of the model from 0. The block recomputes the operators that `policy` names."""
        super().__init__()
        self.policy = policy
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
        return (self._keep_input_alone if LAYER in self.policy else self._compute)(x_sBH, run)

    def _compute(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """The result, with the operators recomputed that the policy names."""
        h_sBH = self.add(x_sBH, self._attention_branch(x_sBH, run))
        return self.add(h_sBH, self._mlp_branch(h_sBH, run))

    def add(self, x_sBH: Tensor, y_sBH: Tensor) -> Tensor:
        """Add the result of a branch to the residual stream."""
        return x_sBH + y_sBH if self.scale == 1.0 else torch.add(x_sBH, y_sBH, alpha=self.scale)

    def _attention_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """attention(norm(x)), [s, B, H]."""
        attention = self.attention
        qkv = _norm_chain(x_sBH, self.attention_norm, self.policy).product("qkv", attention.project)
        y_sBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out)
        return self.attention_dropout(self.attention_out_norm(y_sBH), run)

    def _mlp_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """mlp(norm(x)) or moe(norm(x)), [s, B, H]. Experts keep the result of the norm: the router needs it too."""
        if self.mlp is not None:
            y_sBH = self.mlp.end_chain(_norm_chain(x_sBH, self.mlp_norm, self.policy))
        else:
            assert self.moe is not None, "a block has an MLP or experts"
            y_sBH = self.moe(self.mlp_norm(x_sBH), run, self.policy)
        return self.mlp_dropout(self.mlp_out_norm(y_sBH), run)

    def _keep_input_alone(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """Recompute all but the down product, whose backward starts the recompute. A block with experts, or with a norm
        after its MLP, does not end with that product, and is recomputed to its end."""
        mlp = self.mlp
        if mlp is None or not isinstance(self.mlp_out_norm, nn.Identity):
            return run_again(partial(self._compute, run=run), x_sBH, run.convoy)

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor]:
            h_sBH = self.add(x_sBH, self._attention_branch(x_sBH, run))
            return h_sBH, mlp.activate(mlp.up(self.mlp_norm(h_sBH)))

        (h_sBH,), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self.add(h_sBH, self.mlp_dropout(mlp.down(inner_SBF), run))


def _norm_chain(x_sBH: Tensor, norm: nn.Module, policy: Policy) -> Chain:
    """A chain that begins with the norm, if the block has this norm."""
    chain = Chain(x_sBH, policy)
    return chain if isinstance(norm, nn.Identity) else chain.then("norm", norm)
