"""The parallel block: attention and the MLP both take the block's input, and their results are added together.

GPT-J (Wang and Komatsuzaki 2021) and Falcon 7B have one norm for both; GPT-NeoX (arXiv 2204.06745, section 2.1) and
Falcon 40B have a norm for each. Under tp each rank adds its parts of both results before they are summed over the
ranks: one collective in place of two. With one norm both branches have the same input, so one product computes query,
key, value and the MLP's up product, with one gather of its input and one sum of its gradient.

Shape suffixes: s tokens of this rank between layers, S within them, B batch, H hidden, F inner width of the MLP.
"""

from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.model.attention import Attention
from shardwright.model.block import Block
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.mlp import MLP
from shardwright.parallel.tensor.column_products import Part, column_products
from shardwright.parallel.tensor.linear import LayerSharding, sum_of_parts


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), with an MLP for all tokens."""

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding) -> None:
        super().__init__(spec, number, sharding)
        self.has_one_norm = spec.parallel_block == "one-norm"
        assert isinstance(self.mlp, MLP), "a parallel block has no experts"
        self.mlp: MLP

    def forward(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        return self.add_sum(x_sBH, self.parts(x_sBH, run), run)

    def parts(self, x_sBH: Tensor, run: ForwardPass) -> Tensor:
        """The sum of this rank's parts of attention(norm(x)) and mlp(norm(x)), [S, B, H]."""
        attention, mlp = self.attention, self.mlp
        if self.has_one_norm:
            qkv, up = self.products_of_one_norm(x_sBH)
            return attention.out.part(attention.attend(qkv, run)) + mlp.down.part(mlp.activate(up))
        part_SBH = attention.out.part(attention.attend(attention.project(self.attention_norm(x_sBH)), run))
        return part_SBH + mlp.down.part(mlp.activate(mlp.up(self.mlp_norm(x_sBH))))

    def products_of_one_norm(self, x_sBH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values, and the MLP's up product: both from one norm, in one product."""
        assert isinstance(self.attention, Attention)
        normal_sBH = self.attention_norm(x_sBH)
        weights = self.attention.qkv.weight, self.mlp.up.weight
        qkv, up = column_products(
            normal_sBH, [Part(0, normal_sBH.shape[-1], weight) for weight in weights], self.sharding
        )
        return qkv, up

    def add_sum(self, x_sBH: Tensor, part_SBH: Tensor, run: ForwardPass) -> Tensor:
        """Sum the parts of both branches over tp, add both biases, and add the result to the residual stream."""
        y_sBH = self.attention.out.with_bias(sum_of_parts(part_SBH, self.sharding))
        return self.add(x_sBH, self.mlp_dropout(self.mlp.down.with_bias(y_sBH), run))
