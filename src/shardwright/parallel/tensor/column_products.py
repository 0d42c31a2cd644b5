"""Several column-parallel products that share one collective though not one matrix.

A column-parallel product gathers its input in the forward if the sequence is sharded, and sums its gradient over tp in
the backward. Products whose inputs stand side by side in one tensor can do both together.

Shape suffixes: S sequence, B batch, H width of the input, N output width of this rank; s is S / tp where the sequence
is sharded, and equals S elsewhere.
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
from shardwright.parallel.tensor.recomputed_input import (
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
    """A range of the input's last dim, and the matrix that it is multiplied with; without one it is passed on."""

    start: int
    stop: int
    weight: PlacedParameter | None = None


def column_products(x_sBH: ProductInput, parts: Sequence[Part], cut: LayerSharding) -> tuple[Tensor, ...]:
    """[s, B, H] to what each part gives, [S, B, N]. Ranges may overlap; a part of x in none of them has no gradient.

    Each rank's weights may be a range of a matrix, or a whole one of whose result the rank uses a part of its own:
    either way its gradient of x is a part, and they are summed.
    """
    return _ColumnProducts.apply(*values_and_recipe(x_sBH), tuple(parts), cut)


class _ColumnProducts(torch.autograd.Function):
    """Products of ranges of x, whose backward hides its communication under the weight gradients.

    Forward: all-gather of x along the sequence under sequence parallel, else nothing. Only this rank's part of x is
    kept. Backward: the input gradient is all-reduced (reduce-scattered under sequence parallel) while the weight
    gradients are computed; under sequence parallel x is gathered again meanwhile, instead of having been kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x_sBH: Tensor, recipe: InputRecipe | None, parts: tuple[Part, ...], cut: LayerSharding
    ) -> tuple[Tensor, ...]:
        keep_input(ctx, x_sBH, recipe)
        ctx.parts, ctx.cut = parts, cut
        x_SBH = all_gather(x_sBH, cut.tp) if cut.shards_sequence else x_sBH
        found = []
        for part in parts:
            x_SBR = x_SBH[..., part.start : part.stop]
            copied = x_SBR.clone(memory_format=torch.contiguous_format) if part.weight is None else None
            found.append((copied, None) if part.weight is None else product(x_SBR, part.weight))
        ctx.casts = [None if cast is None else (cast.granularity, tensor_scale(cast)) for _, cast in found]
        return tuple(y for y, _ in found if y is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_sBH = kept_input(ctx)
        cut: LayerSharding = ctx.cut
        x_SBH, gathered = start_gather_again(x_sBH, cut)
        dx_SBH: Tensor | None = None
        gradients: list[Tensor | Quantised] = []
        for part, dy_SBN in zip(ctx.parts, grads, strict=True):
            of_part = (dy_SBN, None) if part.weight is None else input_gradient_of(dy_SBN, part.weight)
            if dx_SBH is None and part.weight is not None and part.stop - part.start == x_SBH.shape[-1]:
                dx_SBH = of_part[0]
            else:
                dx_SBH = torch.zeros_like(x_SBH) if dx_SBH is None else dx_SBH
                dx_SBH[..., part.start : part.stop].add_(of_part[0])
            gradients.append(dy_SBN if of_part[1] is None else of_part[1])
            del of_part
        assert dx_SBH is not None, "there are parts"
        dx_sBH, reduced = start_sum(dx_SBH, x_sBH.shape, cut)
        for part, dy, how in zip(ctx.parts, gradients, ctx.casts, strict=True):
            if part.weight is not None:
                x_SBR = x_SBH[..., part.start : part.stop]
                x = x_SBR if how is None else ToBeCast(x_SBR, *how)
                add_weight_gradient(part.weight, dy, x, gathered, cut=cut)
        reduced.wait()
        return dx_sBH, None, None, None
