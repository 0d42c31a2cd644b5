"""The fp8 products of many experts: each expert is a linear layer of its own, which has some of the rows.

If scales are for tiles, blocks or rows, all rows are cast at once, and each expert uses its rows. A scale for a tensor
is one for each expert, with its own history, because experts see tokens of different kinds. If the matrices are sharded
over tp, such scales are computed over their shards for all experts together.

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
    """Rows of experts in fp8. If scales are for tensors, `matrix.scales` is [e], else it has the scales of all rows."""

    matrix: Quantised

    def expert(self, number: int, rows: slice) -> Quantised:
        """The rows of one expert."""
        scales = self.matrix.scales[number] if self.matrix.granularity == "tensor" else self.matrix.scales[rows]
        return Quantised(self.matrix.values[rows], scales, self.matrix.granularity)


def cast_rows_as_before(x_NK: Tensor, granularity: Granularity, ranges: Ranges, scales_e: Tensor | None) -> CastRows:
    """Rows cast as in the forward; `scales_e` are the scales of that cast if each expert had one."""
    if scales_e is None:
        return CastRows(quantise(x_NK, granularity, E4M3))
    return CastRows(Quantised(cast_groups(x_NK, ranges, E4M3, scales_e), scales_e, granularity))


class Float8Experts:
    """The state of fp8 products of the experts of one weight of shape [e, O, K]."""

    def __init__(self, experts: Sequence[Float8Linear]) -> None:
        self.experts = tuple(experts)
        self.recipe = self.experts[0].recipe

    def weight(self, weight_eOK: Tensor) -> list[CastWeight]:
        """The weights of all experts in fp8, with their values next to each other in memory. Experts without rows are
        cast too, so that the collectives are the same on all ranks."""
        num_casts = [state.num_weight_casts for state in self.experts]
        casts = [state.weight(weight) for state, weight in zip(self.experts, weight_eOK, strict=True)]
        if num_casts == [state.num_weight_casts for state in self.experts]:
            return casts
        stacked = torch.stack([cast.rows.values.view(torch.uint8) for cast in casts]).view(E4M3)
        casts = [
            replace(cast, rows=replace(cast.rows, values=values)) for cast, values in zip(casts, stacked, strict=True)
        ]
        for state, cast in zip(self.experts, casts, strict=True):
            state.hold(cast)
        return casts

    def forward_product(self, x_NK: Tensor, weight_eOK: Tensor, ranges: Ranges) -> tuple[Tensor, CastRows]:
        """x W^T for each row, with the matrix of the row's expert, [N, O] in the dtype of x; and x in fp8."""
        x, weights = self._cast("x", x_NK, E4M3, ranges), self.weight(weight_eOK)
        weight_rows = [weight.rows for weight in weights]
        if has_scaled_grouped_product(x.matrix, weight_rows, x_NK.dtype):
            return scaled_grouped_product(x.matrix, weight_rows, ranges), x
        y_NO = x_NK.new_empty(x_NK.shape[0], weight_eOK.shape[1])
        for expert, rows in ranges:
            y_NO[rows] = product(x.expert(expert, rows), weight_rows[expert], x_NK.dtype)
        return y_NO, x

    def input_gradient(self, dy_NO: Tensor, weight_eOK: Tensor, ranges: Ranges) -> tuple[Tensor, CastRows]:
        """dy W for each row, with the matrix of the row's expert, [N, K] in the dtype of dy; and dy in fp8."""
        dy, weights = self._cast("dy", dy_NO, self.experts[0].gradient_dtype, ranges), self.weight(weight_eOK)
        dx_NK = dy_NO.new_empty(dy_NO.shape[0], weight_eOK.shape[2])
        for expert, rows in ranges:
            dx_NK[rows] = product_with_rows_of(weights[expert], dy.expert(expert, rows), dy_NO.dtype)
        return dx_NK, dy

    @property
    def weight_gradients(self) -> bool:
        """True if weight gradients are in fp8 too."""
        return self.experts[0].weight_gradients

    def memory(self) -> list[Tensor]:
        """The memory of the cast weights."""
        return [tensor for state in self.experts for tensor in state.memory()]

    def drop_weight(self) -> None:
        """Drop the cast weights."""
        for state in self.experts:
            state.drop_weight()

    def weight_changed(self) -> None:
        """Note that the weight's values have changed: it is cast again at the next use."""
        for state in self.experts:
            state.weight_changed()

    def _cast(self, name: str, x_NC: Tensor, dtype: torch.dtype, ranges: Ranges) -> CastRows:
        first = self.experts[0]
        is_cut = first.cut_dim == ("inputs" if name == "x" else "outputs")
        granularity = self.recipe.activation
        if granularity == "tensor":
            return CastRows(Quantised(*self._cast_by_expert(name, x_NC, dtype, ranges, is_cut=is_cut), granularity))
        if is_cut and granularity == "row" and not x_NC.shape[0]:
            first.reduce_max(torch.zeros(1, device=x_NC.device))  # as many collectives as on ranks with rows
            return CastRows(quantise(x_NC, granularity, dtype))
        return CastRows(first.quantise(x_NC, granularity, dtype, is_cut))

    def _cast_by_expert(
        self, name: str, x_NC: Tensor, dtype: torch.dtype, ranges: Ranges, is_cut: bool
    ) -> tuple[Tensor, Tensor]:
        """Values and scales, with one scale for each expert."""
        own_e = torch.zeros(len(self.experts), device=x_NC.device)
        for expert, rows in ranges:
            own_e[expert] = amaxes(x_NC[rows], "tensor")
        past_scales: list[float | None] = [None] * len(self.experts)
        if self.recipe.delayed:
            for expert, _ in ranges:
                self.experts[expert].histories[name].see(own_e[expert])
            past_scales = [state.histories[name].scale for state in self.experts]
        if None in past_scales:
            shared_e = self.experts[0].reduce_max(own_e.clone()) if is_cut else own_e
            scales_e = scales_over_cut(shared_e, own_e, dtype)
        else:
            scales_e = torch.empty_like(own_e)
        for expert, scale in enumerate(past_scales):
            if scale is not None:
                scales_e[expert] = scale + own_e[expert] * 0.0  # nan if the rows are not finite
        return cast_groups(x_NC, ranges, dtype, scales_e), scales_e
