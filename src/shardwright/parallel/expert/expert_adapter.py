"""Low-rank adapters of the matrices of experts, each expert its own: Hu et al. 2021 (arXiv 2106.09685, section 4.1).

Rows are sorted by expert, as in grouped_linear.py. If ranks share an expert, each has all of A of the first matrix and
its rows of B, its columns of A of the last matrix and all of B: what each computes from its part is a part of sums that
are made anyway, of rows forward and backward, and the gradients of what it has whole are summed over the ranks.

Shape suffixes: N rows of all experts, e experts of this rank, H inputs, R rank times the number of maps, r rank, O
outputs of the matrix, M of one map.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.adapter import AdapterSpec
from shardwright.config.matrix import Matrix
from shardwright.parallel.expert.grouped_linear import grouped_linear, grouped_product, row_ranges
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, expert_matrix
from shardwright.parallel.tensor.product_input import ProductInput
from shardwright.sharding.adapter_shapes import down_shape, down_std, up_shape


class ExpertAdapter(nn.Module):
    """The adapters of the maps that lie side by side in one matrix of each expert."""

    def __init__(self, spec: AdapterSpec, matrix: Matrix, sharding: LayerSharding) -> None:
        super().__init__()
        self.spec, self.matrix, self.sharding = spec, matrix, sharding
        self.targets, is_row = spec.targets_of(matrix), matrix.is_row_parallel
        self.a = self._part(down_shape(spec, matrix), 3 if is_row else 0, down_std(matrix))
        for target in self.targets:
            # B begins as zeros, and decays as matrices do.
            dim = 0 if is_row else 1 + (matrix.sharded_dim or 0)
            self.register_parameter(f"b_{target}", self._part(up_shape(spec, matrix, target), dim, 0.0))

    def _part(self, shape: tuple[int, ...], dim: int, std: float) -> PlacedParameter:
        """A rank's part, cut in `dim` over the ranks that share an expert; whole if that is 0, and then each of them
        computes a part of the gradient."""
        return expert_matrix(shape, dim, self.sharding.ep, self.sharding.expert_tp, std=std)

    def add_to(self, y_NO: Tensor, x_NH: ProductInput, counts_e: Tensor) -> Tensor:
        """Add to the result of the matrix, [N, O], in place. `counts_e` are the rows of each expert."""
        kind = self.sharding.ep.kind
        x_NR = grouped_linear(x_NH, self.a, counts_e, self.sharding.deferred, kind)
        return _AddExpertUps.apply(y_NO, x_NR, self, counts_e)

    def ups(self) -> Iterator[tuple[PlacedParameter, slice]]:
        """B of each map, and the range of its outputs."""
        maps = self.spec.maps(self.matrix)
        for target in self.targets:
            up = self.get_parameter(f"b_{target}")
            assert isinstance(up, PlacedParameter)
            width, number = up[0].numel() // self.spec.rank, maps.index(target)
            yield up, slice(number * width, (number + 1) * width)


class _AddExpertUps(torch.autograd.Function):
    """Adds scale x B to a result, in place, for each map of a matrix. Backward: the gradient of the result passes, and
    that of the input of B is computed from it, map by map. Forward and backward move nothing."""

    @staticmethod
    def forward(ctx: Any, y_NO: Tensor, x_NR: Tensor, adapter: ExpertAdapter, counts_e: Tensor) -> Tensor:
        ctx.save_for_backward(x_NR)
        ctx.adapter, ctx.counts_e, rank = adapter, counts_e, adapter.spec.rank
        ctx.mark_dirty(y_NO)
        for number, (up, outputs) in enumerate(adapter.ups()):
            x_Nr = x_NR[:, number * rank : (number + 1) * rank]
            y_NM = grouped_product(x_Nr, up.flatten(1, -2).transpose(1, 2), counts_e, adapter.sharding.ep.kind)
            y_NO[:, outputs].add_(y_NM, alpha=adapter.spec.scale)
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy_NO,), (x_NR,) = grads, ctx.saved_tensors
        adapter: ExpertAdapter = ctx.adapter
        counts_e: Tensor = ctx.counts_e
        rank, dx_NR = adapter.spec.rank, torch.empty_like(x_NR)
        for number, (up, outputs) in enumerate(adapter.ups()):
            part, dy_NM = slice(number * rank, (number + 1) * rank), dy_NO[:, outputs]
            dx_Nr = grouped_product(dy_NM, up.flatten(1, -2), counts_e, adapter.sharding.ep.kind)
            dx_NR[:, part] = dx_Nr.mul_(adapter.spec.scale)
            _add_gradient(adapter, up, dy_NM, x_NR[:, part] * adapter.spec.scale, counts_e)
        return dy_NO, dx_NR, None, None


def _add_gradient(adapter: ExpertAdapter, up: PlacedParameter, dy_NM: Tensor, x_Nr: Tensor, counts_e: Tensor) -> None:
    """Add the gradient of a B, now or with the deferred ones."""
    sharding = adapter.sharding
    sharding.deferred.now_or_later(lambda: up.add_products(dy_NM, x_Nr, row_ranges(counts_e), sharding.ep.kind))


def expert_adapters(spec: AdapterSpec, matrices: tuple[Matrix, Matrix], sharding: LayerSharding) -> nn.ModuleDict:
    """The adapters of the matrices of experts that have some, by the matrix's name."""
    return nn.ModuleDict({m.name: ExpertAdapter(spec, m, sharding) for m in matrices if spec.targets_of(m)})
