"""The fp8 products of many experts: each of them is a linear layer of its own, which has some of the rows.

Where scales are a tile's, a block's or a row's, all rows are cast at once, and each expert takes its own. One scale a
tensor is one an expert, with its own past: experts see tokens of different kinds. It is found over the cut of the
matrices for all experts together.

Shape suffixes: N rows of all experts, e experts of this rank, K inputs, O outputs of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.precision.float8 import E4M3, Granularity, Quantised, Ranges, amaxes, cast_groups, quantise
from shardwright.precision.float8_linear import CastWeight, Float8Linear, product_with_rows_of, scales_over_cut
from shardwright.precision.float8_product import product
from shardwright.precision.scaled_mm import has_scaled_grouped_product, scaled_grouped_product


@dataclass(frozen=True)
class CastRows:
    """Rows of experts in fp8. With one scale a tensor `matrix.scales` are [e], else those of all rows."""

    matrix: Quantised

    def expert(self, number: int, rows: slice) -> Quantised:
        """The rows of one expert."""
        scales = self.matrix.scales[number] if self.matrix.granularity == "tensor" else self.matrix.scales[rows]
        return Quantised(self.matrix.values[rows], scales, self.matrix.granularity)


def cast_rows_as_before(x_NK: Tensor, granularity: Granularity, ranges: Ranges, scales_e: Tensor | None) -> CastRows:
    """Rows as they were cast in the forward, with the scales that experts had then, if they had one each."""
    if scales_e is None:
        return CastRows(quantise(x_NK, granularity, E4M3))
    return CastRows(Quantised(cast_groups(x_NK, ranges, E4M3, scales_e), scales_e, granularity))


class Float8Experts:
    """The state of fp8 products of the experts of one weight of shape [e, O, K]."""

    def __init__(self, experts: Sequence[Float8Linear]) -> None:
        self.experts = tuple(experts)
        self.recipe = self.experts[0].recipe

    def weight(self, weight_eOK: Tensor) -> list[CastWeight]:
        """The weights of all experts in fp8, whose values lie side by side. All are cast at once, whoever has rows:
        what that moves is then the same on all ranks."""
        num_casts = [state.num_weight_casts for state in self.experts]
        casts = [state.weight(weight) for state, weight in zip(self.experts, weight_eOK, strict=True)]
        if num_casts == [state.num_weight_casts for state in self.experts]:
            return casts
        beside = torch.stack([of.rows.values.view(torch.uint8) for of in casts]).view(E4M3)
        casts = [replace(of, rows=replace(of.rows, values=values)) for of, values in zip(casts, beside, strict=True)]
        for state, of in zip(self.experts, casts, strict=True):
            state.hold(of)
        return casts

    def forward_product(self, x_NK: Tensor, weight_eOK: Tensor, ranges: Ranges) -> tuple[Tensor, CastRows]:
        """Row by row x W^T with the matrix of the row's expert, [N, O] in the dtype of x; and x in fp8."""
        x, weights = self._cast("x", x_NK, E4M3, ranges), self.weight(weight_eOK)
        rows = [weight.rows for weight in weights]
        if has_scaled_grouped_product(x.matrix, rows, x_NK.dtype):
            return scaled_grouped_product(x.matrix, rows, ranges), x
        y_NO = x_NK.new_empty(x_NK.shape[0], weight_eOK.shape[1])
        for expert, mine in ranges:
            y_NO[mine] = product(x.expert(expert, mine), rows[expert], x_NK.dtype)
        return y_NO, x

    def input_gradient(self, dy_NO: Tensor, weight_eOK: Tensor, ranges: Ranges) -> tuple[Tensor, CastRows]:
        """Row by row dy W, [N, K] in the dtype of dy; and dy in fp8."""
        dy, weights = self._cast("dy", dy_NO, self.recipe.gradient_dtype, ranges), self.weight(weight_eOK)
        dx_NK = dy_NO.new_empty(dy_NO.shape[0], weight_eOK.shape[2])
        for expert, mine in ranges:
            dx_NK[mine] = product_with_rows_of(weights[expert], dy.expert(expert, mine), dy_NO.dtype)
        return dx_NK, dy

    @property
    def weight_gradients(self) -> bool:
        """True if these are in fp8 too."""
        return self.experts[0].weight_gradients

    def memory(self) -> list[Tensor]:
        """The memory of the cast weights."""
        return [tensor for state in self.experts for tensor in state.memory()]

    def drop_weight(self) -> None:
        """Let the cast weights go."""
        for state in self.experts:
            state.drop_weight()

    def weight_changed(self) -> None:
        """There are other values in the weight."""
        for state in self.experts:
            state.weight_changed()

    def _cast(self, name: str, x_NC: Tensor, dtype: torch.dtype, ranges: Ranges) -> CastRows:
        first = self.experts[0]
        is_cut = first.cut == ("inputs" if name == "x" else "outputs")
        granularity = self.recipe.activation
        if granularity == "tensor":
            return CastRows(Quantised(*self._cast_by_expert(name, x_NC, dtype, ranges, is_cut=is_cut), granularity))
        if is_cut and granularity == "row" and not x_NC.shape[0]:
            first.reduce_max(torch.zeros(1, device=x_NC.device))  # as often as where there are rows
            return CastRows(quantise(x_NC, granularity, dtype))
        return CastRows(first.quantise(x_NC, granularity, dtype, is_cut))

    def _cast_by_expert(
        self, name: str, x_NC: Tensor, dtype: torch.dtype, ranges: Ranges, is_cut: bool
    ) -> tuple[Tensor, Tensor]:
        """Values and scales where each expert has one."""
        own_e = torch.zeros(len(self.experts), device=x_NC.device)
        for expert, rows in ranges:
            own_e[expert] = amaxes(x_NC[rows], "tensor")
        known: list[float | None] = [None] * len(self.experts)
        if self.recipe.delayed:
            for expert, _ in ranges:
                self.experts[expert].histories[name].see(own_e[expert])
            known = [state.histories[name].scale for state in self.experts]
        if None in known:
            shared_e = self.experts[0].reduce_max(own_e.clone()) if is_cut else own_e
            scales_e = scales_over_cut(shared_e, own_e, dtype)
        else:
            scales_e = torch.empty_like(own_e)
        for expert, scale in enumerate(known):
            if scale is not None:
                scales_e[expert] = scale + own_e[expert] * 0.0  # nan where the rows are not finite
        return cast_groups(x_NC, ranges, dtype, scales_e), scales_e
