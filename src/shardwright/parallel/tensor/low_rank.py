"""Low-rank adapters of the matrices of a layer, sharded over tp as their matrices are: Hu et al. 2021 (arXiv
2106.09685, section 4.1).

A map W of [outputs, inputs] gets alpha / rank x B A added, A [rank, inputs] and B [outputs, rank]. Beside a
column-parallel matrix each rank has all of A and its outputs' rows of B: what enters B is gathered or its gradient
summed over tp, rank numbers a token in place of its inputs. Beside a row-parallel one each rank has its inputs' columns
of A and all of B: its product is a part of the sum that the matrix's own result joins, so nothing more is moved.

Shape suffixes: S sequence, B batch, H inputs, R rank times the number of maps, N outputs; s is S / tp if the sequence
is sharded, else S.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.adapter import AdapterSpec
from shardwright.config.matrix import Matrix
from shardwright.parallel.comm.regions import copy_to, gather_from
from shardwright.parallel.tensor.linear import LayerSharding, add_weight_gradient, local_product
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded, whole
from shardwright.parallel.tensor.product_input import ProductInput
from shardwright.sharding.adapter_shapes import down_shape, down_std, up_shape


class Adapter(nn.Module):
    """The adapters of the maps that lie side by side in one matrix."""

    def __init__(self, spec: AdapterSpec, matrix: Matrix, sharding: LayerSharding) -> None:
        super().__init__()
        self.spec, self.matrix, self.sharding = spec, matrix, sharding
        self.targets = spec.targets_of(matrix)
        shape, std = down_shape(spec, matrix), down_std(matrix)
        if matrix.is_row_parallel:
            self.a = sharded(shape, 2, sharding.tp, "normal", std=std)
        else:
            self.a = whole(shape, "normal", std=std, summed_over=sharding.summed_over)
        for target in self.targets:
            self.register_parameter(f"b_{target}", self._up(target))

    def _up(self, target: str) -> PlacedParameter:
        """The B of a map, which begins as zeros, and decays as matrices do."""
        shape = up_shape(self.spec, self.matrix, target)
        if self.matrix.is_row_parallel:
            return whole(shape, "normal", summed_over=self.sharding.tp)  # each rank sees its part of the inputs
        assert self.matrix.sharded_dim is not None
        return sharded(shape, self.matrix.sharded_dim, self.sharding.tp, "normal")

    def add_to(self, y_SBN: Tensor, x_sBH: ProductInput) -> Tensor:
        """Add to this rank's result of the matrix, [S, B, N / tp], in place; for a row-parallel matrix to this rank's
        part of a sum, [S, B, N], from [S, B, H / tp]."""
        x_SBR = local_product(x_sBH, self.a, self.sharding)
        if not self.matrix.is_row_parallel:
            enter = gather_from if self.sharding.shards_sequence else copy_to
            x_SBR = enter(x_SBR, self.sharding.tp)
        return _AddUps.apply(y_SBN, x_SBR, self)

    def ups(self) -> Iterator[tuple[PlacedParameter, slice]]:
        """B of each map, and the range of the maps' outputs along the dim where they lie side by side."""
        first = 0
        for target, width in zip(self.spec.maps(self.matrix), self.matrix.widths or (1,), strict=True):
            if target in self.targets:
                up = self.get_parameter(f"b_{target}")
                assert isinstance(up, PlacedParameter)
                yield up, slice(first, first + width)
            first += width

    def of_map(self, y_SBN: Tensor, up: PlacedParameter, outputs: slice) -> Tensor:
        """The outputs of a map, as a view of those of the matrix: [S, B, ..., outputs, ...]."""
        if len(self.matrix.widths) < 2:
            return y_SBN
        shape = list(up.shape[:-1])
        shape[self.matrix.side_by_side] = sum(self.matrix.widths)
        return y_SBN.unflatten(-1, shape).narrow(
            2 + self.matrix.side_by_side, outputs.start, outputs.stop - outputs.start
        )


class _AddUps(torch.autograd.Function):
    """Adds scale x B to a result, in place, for each map of a matrix. Backward: the gradient of the result passes, and
    that of the input of B is computed from it, map by map. Forward and backward move nothing."""

    @staticmethod
    def forward(ctx: Any, y_SBN: Tensor, x_SBR: Tensor, adapter: Adapter) -> Tensor:
        ctx.save_for_backward(x_SBR)
        ctx.adapter, rank = adapter, adapter.spec.rank
        ctx.mark_dirty(y_SBN)
        for number, (up, outputs) in enumerate(adapter.ups()):
            x_TR = x_SBR[..., number * rank : (number + 1) * rank].flatten(0, 1)
            target, up_NR = adapter.of_map(y_SBN, up, outputs), up.view(-1, rank)
            y_TN = target.flatten(0, 1).flatten(1)
            if y_TN.data_ptr() == target.data_ptr():  # rows with a stride, into which a product can be added
                y_TN.addmm_(x_TR, up_NR.t(), alpha=adapter.spec.scale)
            else:
                target.add_((x_TR @ up_NR.t()).view(target.shape), alpha=adapter.spec.scale)
        return y_SBN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy_SBN,), (x_SBR,) = grads, ctx.saved_tensors
        adapter: Adapter = ctx.adapter
        rank, dx_SBR = adapter.spec.rank, torch.empty_like(x_SBR)
        for number, (up, outputs) in enumerate(adapter.ups()):
            part = slice(number * rank, (number + 1) * rank)
            dy_SBM = adapter.of_map(dy_SBN, up, outputs).flatten(2)
            dx_SBR[..., part] = (dy_SBM @ up.view(-1, rank)).mul_(adapter.spec.scale)
            add_weight_gradient(up, dy_SBM, x_SBR[..., part] * adapter.spec.scale, None, sharding=adapter.sharding)
        return dy_SBN, dx_SBR, None


def adapter_of(spec: AdapterSpec, matrix: Matrix, sharding: LayerSharding) -> Adapter | None:
    """The adapters of a matrix; None if no map of it has one."""
    return Adapter(spec, matrix, sharding) if spec.targets_of(matrix) else None
