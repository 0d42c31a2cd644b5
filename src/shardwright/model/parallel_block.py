"""The parallel block: attention and the MLP both take the block's input, and their results are added together.

GPT-J (Wang and Komatsuzaki 2021) and Falcon 7B have one norm for both; GPT-NeoX (arXiv 2204.06745, section 2.1) and
Falcon 40B have a norm for each. Under tp each rank adds its parts of both results before they are summed over the
ranks: one collective in place of two. With one norm both branches have the same input, so one product computes query,
key, value and the MLP's up product, with one gather of its input and one sum of its gradient.

Shape suffixes: s tokens of this rank between layers, S within them, B batch, H hidden, F inner width of the MLP.
"""

from functools import partial

from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import KEEP_ALL, Policy
from shardwright.model.attention import Attention
from shardwright.model.block import Block
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.mlp import MLP
from shardwright.parallel.recompute.region import Chain, forget
from shardwright.parallel.tensor.column_products import Part, column_products
from shardwright.parallel.tensor.linear import LayerSharding, sum_of_parts


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), with an MLP for all tokens. With one norm, a policy has no effect on norm,
    qkv and up, since both branches need them."""

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy = KEEP_ALL) -> None:
        super().__init__(spec, number, sharding, policy)
        self.has_one_norm = spec.parallel_block == "one-norm"
        assert isinstance(self.mlp, MLP), "a parallel block has no experts"
        self.mlp: MLP

    def _compute(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        attention, mlp, policy = self.attention, self.mlp, self.policy
        if self.has_one_norm:
            qkv, up = (Chain(product, policy) for product in self._products_of_one_norm(x_sBH))
        else:
            qkv = Chain(x_sBH, policy).then("norm", self.attention_norm).product("qkv", attention.project)
        part_SBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out.part)
        if not self.has_one_norm:
            up = Chain(x_sBH, policy).then("norm", self.mlp_norm).product("up", mlp.up)
        part_SBH = part_SBH + up.then("activation", mlp.activate).into(mlp.down.part)
        return self._add_sum(x_sBH, part_SBH, run)

    def _keep_input_alone(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """Recompute all but the down product, whose backward starts the recompute."""
        attention, mlp = self.attention, self.mlp

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if self.has_one_norm:
                qkv, up = self._products_of_one_norm(x_sBH)
            else:
                qkv, up = attention.project(self.attention_norm(x_sBH)), mlp.up(self.mlp_norm(x_sBH))
            part_SBH = attention.out.part(attention.attend(qkv, run))
            inner_SBF = mlp.activate(up)
            # The view is made last, so that its gradient is the first summand, as in a block that keeps all.
            return x_sBH.view_as(x_sBH), part_SBH, inner_SBF

        (x_sBH, part_SBH), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self._add_sum(x_sBH, part_SBH + mlp.down.part(inner_SBF), run)

    def _products_of_one_norm(self, x_sBH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values, and the MLP's up product: both from one norm, in one product."""
        assert isinstance(self.attention, Attention)
        normal_sBH = self.attention_norm(x_sBH)
        weights = self.attention.qkv.weight, self.mlp.up.weight
        qkv, up = column_products(
            normal_sBH, [Part(0, normal_sBH.shape[-1], weight) for weight in weights], self.sharding
        )
        return qkv, up

    def _add_sum(self, x_sBH: Tensor, part_SBH: Tensor, run: ForwardPass) -> Tensor:
        """Sum the parts of both branches over tp, add both biases, and add the result to the residual stream."""
        y_sBH = self.attention.out.with_bias(sum_of_parts(part_SBH, self.sharding))
        return self.add(x_sBH, self.mlp_dropout(self.mlp.down.with_bias(y_sBH), run))


def make_block(spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy) -> Block:
    """Block `number` of a model, parallel if the model's blocks are."""
    return (Block if spec.parallel_block == "none" else ParallelBlock)(spec, number, sharding, policy)
