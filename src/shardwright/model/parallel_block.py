"""The parallel block: attention and an MLP both take the block's input, and what they give is added at once.

Wang and Komatsuzaki 2021 (GPT-J) have one norm for both, as Falcon 7B; GPT-NeoX (arXiv 2204.06745, section 2.1) and
Falcon 40B have a norm for each. Over tp the parts of both are added up on each rank before they are summed: one
collective in place of two. With one norm both take the same, so that one product makes query, key and value and what
goes into the MLP, with one gather of its input and one sum of its gradient.

Shape suffixes: s tokens of this rank between layers, S within them, B batch, H hidden, F inner width of the MLP.
"""

from functools import partial

from torch import Tensor

from shardwright.config.recompute_policy import LAYER
from shardwright.model.attention import Attention
from shardwright.model.block import Block
from shardwright.model.forward_pass import ForwardPass
from shardwright.parallel.recompute.region import Chain, forget
from shardwright.parallel.tensor.column_products import Part, column_products
from shardwright.parallel.tensor.linear import sum_of_parts


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), with an MLP for all tokens. With one norm a policy that names norm, qkv or
    up leaves these as they are, for both halves need them."""

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        assert self.mlp is not None
        if LAYER not in self.policy:
            return self._joined(x_sBH, self._parts(x_sBH, run), run)

        def before_down(x_sBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert self.mlp is not None
            qkv, up = self._entered(x_sBH)
            part_SBH = self.attention.out.part(self.attention.attend(qkv, run))
            inner_SBF = self.mlp.activate(up)
            # Last of all, so that its gradient is the first of those that are added up, as where nothing is forgotten.
            return x_sBH.view_as(x_sBH), part_SBH, inner_SBF

        (x_sBH, part_SBH), inner_SBF = forget(before_down, x_sBH, convoy=run.convoy)
        return self._joined(x_sBH, part_SBH + self.mlp.down.part(inner_SBF), run)

    def _entered(self, x_sBH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values, and what goes into the MLP."""
        assert self.mlp is not None and self.attention_norm is not None
        normal_sBH = self.attention_norm(x_sBH)
        if self.mlp_norm is not None:
            return self.attention.project(normal_sBH), self.mlp.up(self.mlp_norm(x_sBH))
        assert isinstance(self.attention, Attention)
        weights = self.attention.qkv.weight, self.mlp.up.weight
        qkv, up = column_products(normal_sBH, [Part(0, normal_sBH.shape[-1], weight) for weight in weights], self.cut)
        return qkv, up

    def _parts(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """The sum of this rank's parts of both halves, [S, B, H], whose operators are called one by one: some may be
        computed again."""
        attention, mlp, policy = self.attention, self.mlp, self.policy
        assert mlp is not None and self.attention_norm is not None
        if self.mlp_norm is None:
            qkv, up = (Chain(made, policy) for made in self._entered(x_sBH))
        else:
            qkv = Chain(x_sBH, policy).then("norm", self.attention_norm).product("qkv", attention.project)
        part_SBH = qkv.then("attention", partial(attention.attend, run=run)).into(attention.out.part)
        if self.mlp_norm is not None:
            up = Chain(x_sBH, policy).then("norm", self.mlp_norm).product("up", mlp.up)
        return part_SBH + up.then("activation", mlp.activate).into(mlp.down.part)

    def _joined(self, x_sBH: Tensor, part_SBH: Tensor, run: ForwardPass) -> Tensor:
        """The parts of both halves summed over tp, with both biases, and added to the residual stream."""
        assert self.mlp is not None
        y_sBH = self.attention.out.with_bias(sum_of_parts(part_SBH, self.cut))
        return self.join(x_sBH, self.mlp_dropout(self.mlp.down.with_bias(y_sBH), run))
