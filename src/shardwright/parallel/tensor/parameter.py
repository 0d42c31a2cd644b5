"""A parameter with a place: its name, its full shape, and the box of it that this rank holds."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.config.adapter import AdapterSpec
from shardwright.config.plan import split_evenly
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.gradient_sums import add_blocks, add_product, add_rows_in_order
from shardwright.precision.float8 import Quantised, Ranges
from shardwright.precision.float8_experts import CastRows, Float8Experts
from shardwright.precision.float8_gradient import gradient_blocks
from shardwright.precision.float8_linear import Float8Linear
from shardwright.precision.nf4 import dequantise
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.stage_parameters import beside_adapters


class GradientHome(Protocol):
    """The owner of the gradients' memory, which must know when gradients are complete."""

    def open(self, parameter: "PlacedParameter") -> None:
        """Set `parameter.gradient` to a tensor that can be written to."""

    def arrived(self, parameter: "PlacedParameter") -> None:
        """Handle the addition of one more microbatch's gradient."""


class PlacedParameter(nn.Parameter):
    """A parameter with a place, and a gradient that layers write directly to its memory.

    Autograd would return each weight gradient in new memory, to be added to the sum. Instead a layer's own backward
    computes it directly into `gradient`, which may be a view of a bucket and have another dtype. Gradients that
    autograd does return (norms, biases) are moved there at once. `has_gradient` is False while `gradient` holds no sum
    but uninitialised memory, so that nothing need be zeroed. If autograd returns a gradient while those of products are
    deferred, it waits with them in `deferred`: else a norm would open its unit of ZeRO long before the unit's matrices
    need it. `float8` is set if products with the parameter are in fp8. A frozen matrix in NF4 is the words of its rows,
    int32, of which `matrix` makes numbers.
    """

    place: ParameterShard
    home: GradientHome | None
    deferred: DeferredGradients | None
    float8: Float8Linear | Float8Experts | None
    gradient: Tensor | None
    has_gradient: bool

    def __new__(cls, data: Tensor, place: ParameterShard) -> "PlacedParameter":
        self: PlacedParameter = super().__new__(cls, data, requires_grad=place.nf4_row is None)
        self.place, self.home, self.deferred, self.float8 = place, None, None, None
        self.gradient, self.has_gradient = None, False
        if self.requires_grad:
            self.register_post_accumulate_grad_hook(_take_over)
        return self

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Its values as a matrix, [N, H], N all dims but the last: a view, or numbers made of rows in NF4."""
        rows = self.view(-1, self.shape[-1])
        return rows if self.place.nf4_row is None else dequantise(rows, self.place.nf4_row, dtype)

    def box_values(self) -> Tensor:
        """A copy of its values in the shape of its box; of rows in NF4 in float32."""
        return (
            self.detach().clone() if self.place.nf4_row is None else self.matrix(torch.float32).view(self.place.shape)
        )

    def add_gradient(self, gradient: Tensor, is_last: bool = True) -> None:
        """Add to the gradient, now or with the deferred gradients; a frozen parameter has none. `is_last` is as in
        `add_product`."""
        if self.place.is_frozen:
            return
        if self.deferred is None:
            self._add(gradient, is_last)
        else:
            self.deferred.now_or_later(partial(self._add, gradient, is_last))

    def _add(self, gradient: Tensor, is_last: bool) -> None:
        total = self._open()
        if self.has_gradient:
            total.add_(gradient.reshape(total.shape))
        else:
            total.copy_(gradient.reshape(total.shape))
        self._added(is_last)

    def add_product(self, dy_TN: Tensor, x_TH: Tensor, kind: str, is_last: bool = True) -> None:
        """Add dy^T x, the gradient of a linear layer's weight, with the kernels of a kind of device; N is all dims but
        the last. If a microbatch is added in parts, only the last part completes it."""
        add_product(self._open().view(-1, self.shape[-1]), dy_TN, x_TH, self.has_gradient, kind=kind)
        self._added(is_last)

    def add_float8_product(self, dy_TN: Quantised, x_TH: Quantised) -> None:
        """Add dy^T x of operands in fp8, block by block of rows."""
        add_blocks(self._open().view(-1, self.shape[-1]), gradient_blocks(dy_TN, x_TH), self.has_gradient)
        self._added()

    def add_products(self, dy_NO: Tensor, x_NH: Tensor, ranges: Ranges, kind: str) -> None:
        """Add dy^T x of each expert's rows to the expert's matrix, for a weight of shape [experts, ..., H].

        `ranges` are the experts that have rows, with their rows. The gradient of an expert without rows is 0.
        """
        sums_eOH = self._open_experts(ranges)
        for expert, rows in ranges:
            add_product(sums_eOH[expert], dy_NO[rows], x_NH[rows], self.has_gradient, kind=kind)
        self._added()

    def add_float8_products(self, dy_NO: CastRows, x_NH: CastRows, ranges: Ranges) -> None:
        """Add dy^T x of each expert's rows to the expert's matrix, from operands in fp8."""
        sums_eOH = self._open_experts(ranges)
        for expert, rows in ranges:
            blocks = gradient_blocks(dy_NO.expert(expert, rows), x_NH.expert(expert, rows))
            add_blocks(sums_eOH[expert], blocks, self.has_gradient)
        self._added()

    def _open_experts(self, ranges: Ranges) -> Tensor:
        sums_eOH = self._open().flatten(1, -2)
        if not self.has_gradient:
            for expert in set(range(len(sums_eOH))).difference(expert for expert, _ in ranges):
                sums_eOH[expert].zero_()
        return sums_eOH

    def add_rows(self, rows_T: Tensor, dy_TH: Tensor, kind: str) -> None:
        """Add each row of dy to a row of the gradient, for a table of embeddings; with kernels as in `add_product`. A
        frozen table has no gradient."""
        if self.place.is_frozen:
            return
        sum_VH = self._open()
        if not self.has_gradient:
            sum_VH.zero_()
        if kind == "cuda":
            add_rows_in_order(sum_VH, rows_T, dy_TH)
        else:
            sum_VH.index_add_(0, rows_T, dy_TH.to(sum_VH.dtype))
        self._added()

    def _open(self) -> Tensor:
        if self.home is not None:
            self.home.open(self)
        elif self.gradient is None:
            self.gradient = torch.empty_like(self, requires_grad=False)
        assert self.gradient is not None
        return self.gradient

    def _added(self, is_last: bool = True) -> None:
        self.has_gradient = True
        if is_last and self.home is not None:
            self.home.arrived(self)


def _take_over(parameter: Tensor) -> None:
    """Move the gradient that autograd accumulated. The hook also runs if a backward gave no gradient."""
    assert isinstance(parameter, PlacedParameter)
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        parameter.add_gradient(gradient)


def whole(shape: tuple[int, ...], init: str, std: float = 0.0, summed_over: Axis | None = None) -> PlacedParameter:
    """A parameter that every rank holds in full."""
    axes = (summed_over.name,) if summed_over is not None and summed_over.size > 1 else ()
    place = ParameterShard(shape, tuple((0, size) for size in shape), init, std, summed_over=axes)
    return PlacedParameter(torch.empty(shape, device="meta"), place)


def sharded(shape: tuple[int, ...], dim: int, axis: Axis, init: str, std: float = 0.0) -> PlacedParameter:
    """A parameter of full shape `shape`, of which each rank of `axis` holds a range of `dim`."""
    return _sharded_over(shape, {dim: axis}, init, std)


def expert_matrix(shape: tuple[int, ...], dim: int, ep: Axis, expert_tp: Axis, std: float) -> PlacedParameter:
    """One matrix of each of shape[0] experts. A rank of `ep` holds some of the experts, and a rank of `expert_tp` a
    range of `dim` of each of their matrices; or full matrices if `dim` is 0, and a part of the gradient."""
    if dim:
        return _sharded_over(shape, {0: ep, dim: expert_tp}, "normal", std, is_expert=True)
    matrix = _sharded_over(shape, {0: ep}, "normal", std, is_expert=True)
    matrix.place = replace(matrix.place, summed_over=(expert_tp.name,) if expert_tp.size > 1 else ())
    return matrix


def expert_bias(shape: tuple[int, ...], dim: int, ep: Axis, expert_tp: Axis) -> PlacedParameter:
    """One bias of each of shape[0] experts. A rank of `ep` holds some of the experts, and a rank of `expert_tp` a range
    of `dim` of each of their biases, or the full biases if `dim` is 0."""
    return _sharded_over(shape, {0: ep} | ({dim: expert_tp} if dim else {}), "zeros", 0.0, is_expert=True)


def _sharded_over(
    shape: tuple[int, ...], axes: Mapping[int, Axis], init: str, std: float, is_expert: bool = False
) -> PlacedParameter:
    """A parameter sharded over several dims: `axes` gives the axis for each of them."""
    box = [(0, size) for size in shape]
    for dim, axis in axes.items():
        box[dim] = split_evenly(shape[dim], axis.size, axis.index)
    names = tuple(axis.name for axis in axes.values() if axis.size > 1)
    num_parts = math.prod(axis.size for axis in axes.values())
    place = ParameterShard(shape, tuple(box), init, std, sharded_over=names, is_expert=is_expert, num_parts=num_parts)
    return PlacedParameter(torch.empty(place.shape, device="meta"), place)


def placed_parameters(module: nn.Module) -> dict[str, PlacedParameter]:
    """All parameters by name. AssertionError if a parameter has no place."""
    parameters = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, PlacedParameter), f"{name} does not know its place"
        parameters[name] = parameter
    return parameters


def name_parameters(
    module: nn.Module, device: torch.device, dtype: torch.dtype, adapter: AdapterSpec | None = None
) -> None:
    """Give every parameter its name, device and number type, and no memory yet. With an `adapter` all others are
    frozen."""
    for path, child in module.named_modules():
        for key, parameter in list(child.named_parameters(recurse=False)):
            assert isinstance(parameter, PlacedParameter)
            name = parameter.place.name or (f"{path}.{key}" if path else key)
            place = replace(parameter.place, name=name)
            if adapter is not None:
                place = beside_adapters(place, adapter)
            number = dtype if place.nf4_row is None else torch.int32
            setattr(child, key, PlacedParameter(no_memory(place.stored_shape, device, number), place))


def no_memory(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A placeholder of a shape, with the memory of a single element, which `expand` repeats."""
    return torch.zeros((), device=device, dtype=dtype).expand(shape)
