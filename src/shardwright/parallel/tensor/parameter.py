"""A parameter knows its place: its name, its full shape, and the box of it that this rank holds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.config.plan import split_evenly
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.row_sums import add_rows_in_order
from shardwright.precision.float8 import Quantised, Ranges
from shardwright.precision.float8_experts import CastRows, Float8Experts
from shardwright.precision.float8_gradient import gradient_blocks
from shardwright.precision.float8_linear import Float8Linear
from shardwright.sharding.gradient_blocks import rows_at_once
from shardwright.sharding.parameter_shard import ParameterShard


class GradientHome(Protocol):
    """Who gives gradients their memory, and wants to know when they are there."""

    def open(self, parameter: "PlacedParameter") -> None:
        """Make `parameter.gradient` a tensor to write to."""

    def arrived(self, parameter: "PlacedParameter") -> None:
        """One more microbatch has been added."""


class PlacedParameter(nn.Parameter):
    """A parameter with a place, and a gradient that the layers write where it belongs.

    Autograd would hand each weight gradient over in fresh memory, to be added to what is there. A layer's own
    backward computes it straight into `gradient` instead, which may be a view of a bucket and of another dtype; what
    autograd does hand over (norms, biases) is moved there at once. `has_gradient` says whether `gradient` holds a
    sum yet or only memory, so that nothing need be zeroed. Where a gradient is handed over while those of products are
    put off, it waits with them in `deferred`: a unit of ZeRO is not opened for a norm long before the matrices beside
    it. `float8` is there if products with it are in fp8.
    """

    place: ParameterShard
    home: GradientHome | None
    deferred: DeferredGradients | None
    float8: Float8Linear | Float8Experts | None
    gradient: Tensor | None
    has_gradient: bool

    def __new__(cls, data: Tensor, place: ParameterShard) -> "PlacedParameter":
        self: PlacedParameter = super().__new__(cls, data, requires_grad=True)
        self.place, self.home, self.deferred, self.float8 = place, None, None, None
        self.gradient, self.has_gradient = None, False
        self.register_post_accumulate_grad_hook(_take_over)
        return self

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the gradient, now or with those that are put off."""
        if self.deferred is None:
            self._add(gradient)
        else:
            self.deferred.now_or_later(partial(self._add, gradient))

    def _add(self, gradient: Tensor) -> None:
        into = self._open()
        if self.has_gradient:
            into.add_(gradient.reshape(into.shape))
        else:
            into.copy_(gradient.reshape(into.shape))
        self._added()

    def add_product(self, dy_TN: Tensor, x_TH: Tensor, kind: str, is_last: bool = True) -> None:
        """Add dy^T x, the gradient of a linear layer's weight, with the kernels of a kind of device; N is all dims but
        the last. Of a microbatch that comes in parts only the last one completes it."""
        add_product(self._open().view(-1, self.shape[-1]), dy_TN, x_TH, self.has_gradient, kind=kind)
        self._added(is_last)

    def add_float8_product(self, dy_TN: Quantised, x_TH: Quantised) -> None:
        """Add dy^T x of operands in fp8, block by block of rows."""
        add_blocks(self._open().view(-1, self.shape[-1]), gradient_blocks(dy_TN, x_TH), self.has_gradient)
        self._added()

    def add_products(self, dy_NO: Tensor, x_NH: Tensor, ranges: Ranges, kind: str) -> None:
        """Add dy^T x of some rows to the matrix of each expert, for a weight of shape [experts, ..., H].

        `ranges` are the experts that have rows, and which. Without any a gradient is 0.
        """
        into_eOH = self._open_experts(ranges)
        for expert, rows in ranges:
            add_product(into_eOH[expert], dy_NO[rows], x_NH[rows], self.has_gradient, kind=kind)
        self._added()

    def add_float8_products(self, dy_NO: CastRows, x_NH: CastRows, ranges: Ranges) -> None:
        """Add dy^T x of some rows to the matrix of each expert, of operands in fp8."""
        into_eOH = self._open_experts(ranges)
        for expert, rows in ranges:
            blocks = gradient_blocks(dy_NO.expert(expert, rows), x_NH.expert(expert, rows))
            add_blocks(into_eOH[expert], blocks, self.has_gradient)
        self._added()

    def _open_experts(self, ranges: Ranges) -> Tensor:
        into_eOH = self._open().flatten(1, -2)
        if not self.has_gradient:
            for expert in set(range(len(into_eOH))).difference(expert for expert, _ in ranges):
                into_eOH[expert].zero_()
        return into_eOH

    def add_rows(self, rows_T: Tensor, dy_TH: Tensor, kind: str) -> None:
        """Add each row of dy to one row, the gradient of a table that was looked up; with kernels as in
        `add_product`."""
        into_VH = self._open()
        if not self.has_gradient:
            into_VH.zero_()
        if kind == "cuda":
            add_rows_in_order(into_VH, rows_T, dy_TH)
        else:
            into_VH.index_add_(0, rows_T, dy_TH.to(into_VH.dtype))
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


def add_product(into_NH: Tensor, dy_TN: Tensor, x_TH: Tensor, has_sum: bool, kind: str) -> None:
    """Add dy^T x to a sum, or put it where there is none yet, with the kernels of a kind of device."""
    dy_NT = dy_TN.t()
    is_one_kernel = kind == "cuda" and into_NH.dtype == torch.float32
    if into_NH.dtype == dy_TN.dtype:
        into_NH.addmm_(dy_NT, x_TH) if has_sum else torch.mm(dy_NT, x_TH, out=into_NH)
    elif is_one_kernel and has_sum:
        torch.addmm(into_NH, dy_NT, x_TH, out_dtype=into_NH.dtype, out=into_NH)
    elif is_one_kernel:
        torch.mm(dy_NT, x_TH, out_dtype=into_NH.dtype, out=into_NH)
    else:
        num_rows = rows_at_once(x_TH.shape[1], x_TH.element_size())
        for into_RH, dy_RT in zip(into_NH.split(num_rows), dy_NT.split(num_rows), strict=True):
            into_RH.add_(dy_RT @ x_TH) if has_sum else into_RH.copy_(dy_RT @ x_TH)


def add_blocks(into_NH: Tensor, blocks: Iterable[tuple[slice, Tensor]], has_sum: bool) -> None:
    """Add blocks of rows to a sum, or put them where there is none yet."""
    for rows, block in blocks:
        into_NH[rows].add_(block) if has_sum else into_NH[rows].copy_(block)


def _take_over(parameter: Tensor) -> None:
    """Move what autograd accumulated. The hook also runs where a backward had no gradient to give."""
    assert isinstance(parameter, PlacedParameter)
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        parameter.add_gradient(gradient)


def whole(shape: tuple[int, ...], init: str, std: float = 0.0, summed_over: Axis | None = None) -> PlacedParameter:
    """A parameter that every rank holds whole."""
    axes = (summed_over.name,) if summed_over is not None and summed_over.size > 1 else ()
    place = ParameterShard(shape, tuple((0, size) for size in shape), init, std, summed_over=axes)
    return PlacedParameter(torch.empty(shape, device="meta"), place)


def sharded(shape: tuple[int, ...], dim: int, axis: Axis, init: str, std: float = 0.0) -> PlacedParameter:
    """A parameter of full shape `shape`, of which each rank of `axis` holds a range of `dim`."""
    return _cut(shape, {dim: axis}, init, std)


def expert_matrix(shape: tuple[int, ...], dim: int, ep: Axis, expert_tp: Axis, std: float) -> PlacedParameter:
    """One matrix of each of shape[0] experts, of which a rank of `ep` holds some, and a rank of `expert_tp` a range of
    `dim` of each."""
    return _cut(shape, {0: ep, dim: expert_tp}, "normal", std, is_expert=True)


def expert_bias(shape: tuple[int, ...], dim: int, ep: Axis, expert_tp: Axis) -> PlacedParameter:
    """One bias of each of shape[0] experts, of which a rank of `expert_tp` holds a range of `dim` of each, or all if
    that is 0."""
    return _cut(shape, {0: ep} | ({dim: expert_tp} if dim else {}), "zeros", 0.0, is_expert=True)


def _cut(
    shape: tuple[int, ...], axes: Mapping[int, Axis], init: str, std: float, is_expert: bool = False
) -> PlacedParameter:
    """A parameter of which each rank of an axis holds a range of the dim that the axis is given for."""
    box = [(0, size) for size in shape]
    for dim, axis in axes.items():
        box[dim] = split_evenly(shape[dim], axis.size, axis.index)
    names = tuple(axis.name for axis in axes.values() if axis.size > 1)
    num_parts = math.prod(axis.size for axis in axes.values())
    place = ParameterShard(shape, tuple(box), init, std, sharded_over=names, is_expert=is_expert, num_parts=num_parts)
    return PlacedParameter(torch.empty(place.shape, device="meta"), place)


def placed_parameters(module: nn.Module) -> dict[str, PlacedParameter]:
    """All parameters by name. Fails if one does not know its place."""
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, PlacedParameter), f"{name} does not know its place"
        found[name] = parameter
    return found


def name_parameters(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter its name, device and number type, and no memory yet."""
    for path, child in module.named_modules():
        for key, parameter in list(child.named_parameters(recurse=False)):
            assert isinstance(parameter, PlacedParameter)
            name = parameter.place.name or (f"{path}.{key}" if path else key)
            place = replace(parameter.place, name=name)
            setattr(child, key, PlacedParameter(no_memory(place.shape, device, dtype), place))


def no_memory(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor that stands where there will be one, or was: `expand` shows a single element everywhere."""
    return torch.zeros((), device=device, dtype=dtype).expand(shape)
