"""Blocks that recompute parts of their forward in the backward, instead of keeping the results.

A policy (config/recompute_policy.py) names the operators that are recomputed, or the whole layer. Results and gradients
are bit-identical to those of a block that keeps all (parallel/recompute/region.py).

Shape suffixes: s tokens of this rank between layers, S within them, B batch, H hidden, F inner width of the MLP.
"""

from functools import partial

from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, LAYER, Policy
from shardwright.model.block import Block
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.parallel_block import ParallelBlock
from shardwright.parallel.recompute.region import Chain, forget, run_again
from shardwright.parallel.tensor.linear import LayerSharding


class RecomputedBlock(Block):
    """A block whose operators are called one by one, so that each may be recomputed; or one that keeps only its
    input."""

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy) -> None:
        super().__init__(spec, number, sharding)
        self.policy = policy

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if LAYER in self.policy:
            return self._keep_input_alone(x_sBH, run)
        h_sBH = self.add(x_sBH, self._attention_branch(x_sBH, run))
        return self.add(h_sBH, self._mlp_branch(h_sBH, run))

    def _attention_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        attention = self.attention
        qkv = _take_norm(Chain(x_sBH, self.policy), self.attention_norm).product("qkv", attention.project)
        y_sBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out)
        return self.attention_dropout(self.attention_out_norm(y_sBH), run)

    def _mlp_branch(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """A block with experts keeps the result of the norm, since the router needs it too."""
        if self.mlp is not None:
            y_sBH = self.mlp.end_chain(_take_norm(Chain(x_sBH, self.policy), self.mlp_norm))
        else:
            assert self.moe is not None, "a block has an MLP or experts"
            y_sBH = self.moe(self.mlp_norm(x_sBH), run, self.policy)
        return self.mlp_dropout(self.mlp_out_norm(y_sBH), run)

    def _keep_input_alone(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """Recompute all but the down product, whose backward starts the recompute. A block with experts, or with a norm
        after its MLP, does not end with that product, and is recomputed to its end."""
        mlp = self.mlp
        if mlp is None or not isinstance(self.mlp_out_norm, nn.Identity):
            return run_again(partial(super().forward, run=run), x_sBH, run.convoy)

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor]:
            h_sBH = self.add(x_sBH, self.attention_branch(x_sBH, run))
            return h_sBH, mlp.activate(mlp.up(self.mlp_norm(h_sBH)))

        (h_sBH,), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self.add(h_sBH, self.mlp_dropout(mlp.down(inner_SBF), run))


class RecomputedParallelBlock(ParallelBlock):
    """A parallel block that recomputes operators, or keeps only its input. With one norm, a policy has no effect on
    norm, qkv and up, since both branches need them."""

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy) -> None:
        super().__init__(spec, number, sharding)
        self.policy = policy

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        if LAYER in self.policy:
            return self._keep_input_alone(x_sBH, run)
        return self.add_sum(x_sBH, self._parts_in_chains(x_sBH, run), run)

    def _parts_in_chains(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        attention, mlp, policy = self.attention, self.mlp, self.policy
        if self.has_one_norm:
            qkv, up = (Chain(product, policy) for product in self.products_of_one_norm(x_sBH))
        else:
            qkv = Chain(x_sBH, policy).then("norm", self.attention_norm).product("qkv", attention.project)
        part_SBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out.part)
        if not self.has_one_norm:
            up = Chain(x_sBH, policy).then("norm", self.mlp_norm).product("up", mlp.up)
        return part_SBH + up.then("activation", mlp.activate).into(mlp.down.part)

    def _keep_input_alone(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """Recompute all but the down product, whose backward starts the recompute."""
        attention, mlp = self.attention, self.mlp

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if self.has_one_norm:
                qkv, up = self.products_of_one_norm(x_sBH)
            else:
                qkv, up = attention.project(self.attention_norm(x_sBH)), mlp.up(self.mlp_norm(x_sBH))
            part_SBH = attention.out.part(attention.attend(qkv, run))
            inner_SBF = mlp.activate(up)
            # The view is made last, so that its gradient is the first summand, as in a block that keeps all.
            return x_sBH.view_as(x_sBH), part_SBH, inner_SBF

        (x_sBH, part_SBH), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self.add_sum(x_sBH, part_SBH + mlp.down.part(inner_SBF), run)


def _take_norm(chain: Chain, norm: nn.Module) -> Chain:
    """The chain with the norm, if the block has this norm."""
    return chain if isinstance(norm, nn.Identity) else chain.then("norm", norm)


def make_block(spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy = KEEP_ALL) -> Block:
    """Block `number` of a model, parallel if the model's blocks are, which recomputes the operators that `policy`
    names."""
    is_parallel = spec.parallel_block != "none"
    if policy == KEEP_ALL:
        return (ParallelBlock if is_parallel else Block)(spec, number, sharding)
    return (RecomputedParallelBlock if is_parallel else RecomputedBlock)(spec, number, sharding, policy)
