"""Low-rank adapters of the matrices of a layer, sharded over tp as their matrices are: Hu et al. 2021 (arXiv
2106.09685, section 4.1).

A map W of [outputs, inputs] gets alpha / rank x B A added, A [rank, inputs] and B [outputs, rank]. Beside a
column-parallel matrix each rank has all of A and its outputs' rows of B: what enters B is gathered or its gradient
summed over tp, rank numbers a token in place of its inputs. Beside a row-parallel one each rank has its inputs' columns
of A and all of B: its product is a part of the sum that the matrix's own result joins, so nothing more is moved.

Shape suffixes: S sequence, B batch, H inputs, R rank times the number of maps, N outputs; s is S / tp if the sequence
is sharded, else S.
"""

import math

import torch
from torch import Tensor, nn

from shardwright.config.adapter import AdapterSpec
from shardwright.config.matrix import Matrix
from shardwright.parallel.comm.regions import copy_to, gather_from
from shardwright.parallel.tensor.linear import LayerSharding, local_product
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

    def forward(self, x_sBH: ProductInput) -> Tensor:
        """What is added to this rank's result of the matrix: [s, B, H] to [S, B, N / tp]; for a row-parallel matrix
        this rank's part of a sum, [S, B, H / tp] to [S, B, N]."""
        x_sBR = local_product(x_sBH, self.a, self.sharding)
        if not self.matrix.is_row_parallel:
            enter = gather_from if self.sharding.shards_sequence else copy_to
            x_sBR = enter(x_sBR, self.sharding.tp)
        parts = dict(zip(self.targets, x_sBR.split(self.spec.rank, dim=-1), strict=True))
        dim = 2 + self.matrix.side_by_side
        results, missing = [], []
        for target, width in zip(self.spec.maps(self.matrix), self.matrix.widths or (1,), strict=True):
            if target in parts:
                up: PlacedParameter = self.get_parameter(f"b_{target}")  # type: ignore[assignment]
                y_SBN = local_product(parts[target], up, self.sharding)
                results.append(y_SBN.unflatten(-1, up.shape[:-1]))
            else:
                results.append(torch.empty(0))
                missing.append((len(results) - 1, width))
        example = next(y for y in results if y.numel())
        for number, width in missing:
            shape = [*example.shape]
            shape[dim] = width
            results[number] = example.new_zeros(shape)
        y_SBN = torch.cat(results, dim=dim) if len(results) > 1 else results[0]
        return y_SBN.flatten(2) * self.spec.scale


def adapter_of(spec: AdapterSpec, matrix: Matrix, sharding: LayerSharding) -> Adapter | None:
    """The adapters of a matrix; None if no map of it has one."""
    return Adapter(spec, matrix, sharding) if spec.targets_of(matrix) else None


def num_adapter_elements(spec: AdapterSpec, matrix: Matrix) -> int:
    """Elements of the adapters of a matrix."""
    ups = sum(math.prod(up_shape(spec, matrix, target)) for target in spec.targets_of(matrix))
    return math.prod(down_shape(spec, matrix)) + ups
