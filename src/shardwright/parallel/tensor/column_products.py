"""Several column-parallel products with different matrices that share one collective.

A column-parallel product gathers its input in the forward if the sequence is sharded, and sums its gradient over tp in
the backward. Products whose inputs are ranges of one tensor share both collectives.

Shape suffixes: S sequence, B batch, H width of the input, N output width of this rank; s is S / tp if the sequence is
sharded, else S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.tensor.linear import (
    LayerSharding,
    ToBeCast,
    add_weight_gradient,
    input_gradient_of,
    product,
    start_gather_again,
    start_sum,
)
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.tensor.product_input import (
    InputRecipe,
    ProductInput,
    keep_input,
    kept_input,
    values_and_recipe,
)
from shardwright.precision.float8 import Quantised
from shardwright.precision.float8_gradient import tensor_scale


@dataclass(frozen=True)
class Part:
    """A range of the input's last dim, and the matrix that multiplies it; without a matrix the range itself is the
    result."""

    start: int
    stop: int
    weight: PlacedParameter | None = None


def column_products(x_sBH: ProductInput, parts: Sequence[Part], sharding: LayerSharding) -> tuple[Tensor, ...]:
    """[s, B, H] to the result of each part, [S, B, N]. Ranges may overlap; elements of x in no range have no gradient.

    A rank's weight may be its range of a matrix, or a full matrix of whose result the rank uses its part. Either way
    the rank's gradient of x is partial, and the ranks' gradients are summed.
    """
    return _ColumnProducts.apply(*values_and_recipe(x_sBH), tuple(parts), sharding)


class _ColumnProducts(torch.autograd.Function):
    """Products of ranges of x, whose backward hides its communication under the weight gradients.

    Forward: all-gather of x along the sequence under sequence parallel, else no communication. Only this rank's part of
    x is kept. Backward: the input gradient is all-reduced (reduce-scattered under sequence parallel) while the weight
    gradients are computed; under sequence parallel x, which was not kept, is gathered again meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, x_sBH: Tensor, recipe: InputRecipe | None, parts: tuple[Part, ...], sharding: LayerSharding
    ) -> tuple[Tensor, ...]:
        keep_input(ctx, x_sBH, recipe)
        ctx.parts, ctx.sharding = parts, sharding
        x_SBH = all_gather(x_sBH, sharding.tp) if sharding.shards_sequence else x_sBH
        products = []
        for part in parts:
            x_SBR = x_SBH[..., part.start : part.stop]
            copied = x_SBR.clone(memory_format=torch.contiguous_format) if part.weight is None else None
            products.append((copied, None) if part.weight is None else product(x_SBR, part.weight))
        ctx.casts = [None if cast is None else (cast.granularity, tensor_scale(cast)) for _, cast in products]
        return tuple(y for y, _ in products if y is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_sBH = kept_input(ctx)
        sharding: LayerSharding = ctx.sharding
        x_SBH, gathered = start_gather_again(x_sBH, sharding)
        dx_SBH: Tensor | None = None
        gradients: list[Tensor | Quantised] = []
        for part, dy_SBN in zip(ctx.parts, grads, strict=True):
            gradient_and_cast = (dy_SBN, None) if part.weight is None else input_gradient_of(dy_SBN, part.weight)
            if dx_SBH is None and part.weight is not None and part.stop - part.start == x_SBH.shape[-1]:
                dx_SBH = gradient_and_cast[0]
            else:
                dx_SBH = torch.zeros_like(x_SBH) if dx_SBH is None else dx_SBH
                dx_SBH[..., part.start : part.stop].add_(gradient_and_cast[0])
            gradients.append(dy_SBN if gradient_and_cast[1] is None else gradient_and_cast[1])
            del gradient_and_cast
        assert dx_SBH is not None, "there are parts"
        dx_sBH, reduced = start_sum(dx_SBH, x_sBH.shape, sharding)
        for part, dy, granularity_and_scale in zip(ctx.parts, gradients, ctx.casts, strict=True):
            if part.weight is not None:
                x_SBR = x_SBH[..., part.start : part.stop]
                x = x_SBR if granularity_and_scale is None else ToBeCast(x_SBR, *granularity_and_scale)
                add_weight_gradient(part.weight, dy, x, gathered, sharding=sharding)
        reduced.wait()
        return dx_sBH, None, None, None
