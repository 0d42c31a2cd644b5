"""Tensor parallel: the matrices of a layer, cut over the tp axis. Shoeybi et al. 2019 (arXiv 1909.08053).

A column-parallel linear holds some of the outputs, a row-parallel one some of the inputs. In the pair
row(act(column(x))) no rank needs another's intermediate, and one all-reduce at the end is enough. With sequence
parallel (Korthikanti et al. 2022, arXiv 2205.05198) what stands between the pairs is sharded over the sequence, and
the all-reduce becomes a reduce-scatter after and an all-gather before: the same bytes, less memory.

Shape suffixes: S sequence, B batch, H hidden (input width), N output width; s is S / tp where the sequence is
sharded, and equals S elsewhere.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.parallel.comm.collectives import (
    Axis,
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from shardwright.parallel.comm.regions import reduce_from, scatter_to
from shardwright.parallel.tensor.cast_input import keep_input_or_cast, kept_cast, own_part
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded, whole
from shardwright.parallel.tensor.recomputed_input import (
    InputRecipe,
    ProductInput,
    kept_input,
    values_and_recipe,
)
from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_gradient import cast_as_before
from shardwright.precision.float8_linear import Float8Linear, forward_and_cast, input_gradient_and_cast
from shardwright.precision.float8_product import dequantise
from shardwright.sharding.sequence import Ranges, held_ranges, share_of


@dataclass(frozen=True)
class LayerSharding:
    """How the layers of one stage are cut: over which axes, whether the sequence is sharded over tp between the layers,
    and where weight gradients wait if the schedule puts them off.

    Ranks of `cp` each hold a part of every sequence, the one that `cp_method` of attention asks for; those of `ep`
    different experts, and those of `expert_tp` share the matrices of each expert; rows travel to experts in fp8 or not.
    """

    tp: Axis
    cp: Axis
    ep: Axis
    expert_tp: Axis
    sequence_parallel: bool = False
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    cp_method: str = "ring"
    float8_dispatch: bool = False

    @classmethod
    def of_tp(cls, tp: Axis, sequence_parallel: bool = False) -> "LayerSharding":
        """A cut over tp alone."""
        return cls(tp, tp.alone("cp"), tp.alone("ep"), tp, sequence_parallel=sequence_parallel)

    @property
    def shards_sequence(self) -> bool:
        """True if a rank holds only its part of the sequence between layers."""
        return self.sequence_parallel and self.tp.size > 1

    @property
    def trades_heads(self) -> bool:
        """True if attention sees the whole sequence of some heads."""
        return self.cp.size > 1 and CONTEXT_METHODS[self.cp_method].trades_heads

    def held(self, sequence: int) -> Ranges:
        """The positions of this rank's tokens within the layers."""
        return held_ranges(sequence, self.cp.size, self.cp.index, self.cp_method)

    def held_between(self, sequence: int) -> Ranges:
        """The positions of this rank's tokens between the layers."""
        held = self.held(sequence)
        return share_of(held, self.tp.size, self.tp.index) if self.shards_sequence else held

    @property
    def summed_over(self) -> Axis | None:
        """The axis whose ranks each see a part of the tokens, and so of a replicated parameter's gradient."""
        return self.tp if self.shards_sequence else None


class ColumnLinear(nn.Module):
    """x W^T of which each tp rank computes its share of the outputs.

    The weight's full shape is (*out_shape, in_features); `dim` is the dim of out_shape that is cut. Several
    matrices that share their input (query, key and value; gate and up) are one weight, one product and one
    collective. The result is [S, B, N / tp], N = product of out_shape. `owns_input`: nobody else keeps the input.
    """

    def __init__(
        self, in_features: int, out_shape: tuple[int, ...], dim: int, cut: LayerSharding, std: float,
        owns_input: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cut, self.owns_input = cut, owns_input
        self.weight = sharded((*out_shape, in_features), dim, cut.tp, "normal", std=std)

    def forward(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to [S, B, N / tp]."""
        return _ColumnProduct.apply(*values_and_recipe(x_sBH), self.weight, self.cut, self.owns_input)


class RowLinear(nn.Module):
    """x W^T of which each tp rank holds its share of the inputs; the partial products are summed over tp.

    `owns_input`: nobody else keeps the input.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, cut: LayerSharding, std: float, owns_input: bool = True
    ) -> None:
        super().__init__()
        self.cut, self.owns_input = cut, owns_input
        self.weight = sharded((out_features, in_features), 1, cut.tp, "normal", std=std)
        # Added once, after the sum. Under sequence parallel each rank adds it to its own tokens alone.
        self.bias = whole((out_features,), "zeros", summed_over=cut.summed_over) if bias else None

    def forward(self, x_SBH: ProductInput) -> Tensor:
        """[S, B, H / tp] to [s, B, N]."""
        return self.with_bias(sum_of_parts(self.part(x_SBH), self.cut))

    def part(self, x_SBH: ProductInput) -> Tensor:
        """This rank's part of the sum, [S, B, N], without the bias."""
        return local_product(x_SBH, self.weight, self.cut, self.owns_input)

    def with_bias(self, y_sBN: Tensor) -> Tensor:
        """The sum of all parts, with the bias if there is one."""
        return y_sBN if self.bias is None else y_sBN + self.bias


class ReplicatedLinear(nn.Module):
    """x W^T that each tp rank computes whole, of the tokens that it has. Moves nothing.

    Under sequence parallel those are a part of the sequence, so that the ranks' gradients must be summed; and so they
    must where what follows is cut (`summed_over`).
    """

    def __init__(
        self, in_features: int, out_features: int, cut: LayerSharding, std: float, summed_over: Axis | None = None
    ) -> None:
        super().__init__()
        self.cut = cut
        axis = summed_over or cut.summed_over
        self.weight = whole((out_features, in_features), "normal", std, summed_over=axis)

    def forward(self, x_SBH: ProductInput) -> Tensor:
        """[s, B, H] to [s, B, N]."""
        return local_product(x_SBH, self.weight, self.cut)


def sum_of_parts(part_SBN: Tensor, cut: LayerSharding) -> Tensor:
    """The sum over tp of what row-parallel products gave on each rank, [s, B, N]."""
    leave = scatter_to if cut.shards_sequence else reduce_from
    return leave(part_SBN, cut.tp)


def local_product(x_SBH: ProductInput, weight: PlacedParameter, cut: LayerSharding, owns_input: bool = False) -> Tensor:
    """x W^T of this rank's tokens with its part of a matrix, [S, B, N]. Moves nothing, forward or backward."""
    return _LocalProduct.apply(*values_and_recipe(x_SBH), weight, cut, owns_input)


def product(x_SBH: Tensor, weight: PlacedParameter) -> tuple[Tensor, Quantised | None]:
    """x W^T, in fp8 if the weight's products are; and x in fp8, if the weight's gradient is to be made of that."""
    weight_NH = weight.view(-1, weight.shape[-1])
    if weight.float8 is None:
        return functional.linear(x_SBH, weight_NH), None
    state = _state(weight)
    y_TN, cast = forward_and_cast(state, x_SBH.flatten(0, 1), weight_NH)
    return y_TN.unflatten(0, x_SBH.shape[:2]), cast if state.weight_gradients else None


def input_gradient_of(dy_SBN: Tensor, weight: PlacedParameter) -> tuple[Tensor, Quantised | None]:
    """dy W, in fp8 if the weight's products are; and dy in fp8, if the weight's gradient is to be made of that."""
    weight_NH = weight.view(-1, weight.shape[-1])
    if weight.float8 is None:
        return dy_SBN @ weight_NH, None
    state = _state(weight)
    dx_TH, cast = input_gradient_and_cast(state, dy_SBN.flatten(0, 1), weight_NH)
    return dx_TH.unflatten(0, dy_SBN.shape[:2]), cast if state.weight_gradients else None


def _state(weight: PlacedParameter) -> Float8Linear:
    assert isinstance(weight.float8, Float8Linear), f"{weight.place.name} is one matrix"
    return weight.float8


class _ColumnProduct(torch.autograd.Function):
    """Column-parallel product whose backward hides its communication under the weight gradient.

    Forward: all-gather of x along the sequence under sequence parallel, else nothing. Only this rank's part of x is
    kept. Backward: the input gradient is all-reduced (reduce-scattered under sequence parallel) while the weight
    gradient is computed; under sequence parallel x is gathered again meanwhile, instead of having been kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_sBH: Tensor,
        recipe: InputRecipe | None,
        weight: PlacedParameter,
        cut: LayerSharding,
        owns_input: bool,
    ) -> Tensor:
        # Not a saved tensor: the weight may be let go after the forward, and gathered again into other memory.
        ctx.weight, ctx.cut = weight, cut
        x_SBH = all_gather(x_sBH, cut.tp) if cut.shards_sequence else x_sBH
        y_SBN, cast = product(x_SBH, weight)
        own = own_part(cast, cut.tp.size, cut.tp.index) if cast is not None and cut.shards_sequence else cast
        keep_input_or_cast(ctx, x_sBH, recipe, own, owns_input=owns_input)
        return y_SBN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dy_SBN,) = grads
        weight: PlacedParameter = ctx.weight
        cut: LayerSharding = ctx.cut
        shape: torch.Size = ctx.shape
        operand, gathered = _input_again(ctx, cut, dy_SBN.dtype)
        dx_SBH, of_dy = input_gradient_of(dy_SBN, weight)
        dx_sBH, reduced = start_sum(dx_SBH, shape, cut)
        del dx_SBH
        add_weight_gradient(weight, dy_SBN if of_dy is None else of_dy, operand, gathered, cut=cut)
        reduced.wait()
        return dx_sBH, None, None, None, None


def _input_again(ctx: Any, cut: LayerSharding, dtype: torch.dtype) -> tuple["Operand", Pending | None]:
    """The input of a column-parallel product in its backward, once what is pending is over: gathered where the sequence
    is sharded, as what it stands for, and cast as in the forward then."""
    if ctx.granularity is None:
        return start_gather_again(kept_input(ctx), cut)
    if not cut.shards_sequence:
        return kept_cast(ctx), None
    x_sBH = dequantise(kept_cast(ctx), dtype).view(ctx.shape) if ctx.keeps_cast else kept_input(ctx)
    x_SBH, gathered = start_gather_again(x_sBH, cut)
    return ToBeCast(x_SBH, ctx.granularity, ctx.scale), gathered


# The backward of column-parallel products, piece by piece; column_products.py has the same for several at once.


def start_gather_again(x_sBH: Tensor, cut: LayerSharding) -> tuple[Tensor, Pending | None]:
    """The input of a column-parallel product in a backward, [S, B, H], once what is pending is over: an all-gather
    where the sequence is sharded."""
    if not cut.shards_sequence:
        return x_sBH, None
    tp = cut.tp
    x_SBH = x_sBH.new_empty(x_sBH.shape[0] * tp.size, *x_sBH.shape[1:])
    return x_SBH, start_all_gather(x_SBH, x_sBH, tp)


def start_sum(dx_SBH: Tensor, shape: torch.Size, cut: LayerSharding) -> tuple[Tensor, Pending]:
    """The ranks' parts of an input gradient, summed in the shape of x once what is pending is over: an all-reduce, or
    where the sequence is sharded a reduce-scatter."""
    tp = cut.tp
    if not cut.shards_sequence:
        return dx_SBH, start_all_reduce(dx_SBH, tp)
    dx_sBH = dx_SBH.new_empty(shape)
    return dx_sBH, start_reduce_scatter(dx_sBH, dx_SBH, tp)


class ToBeCast(NamedTuple):
    """An input that is still on its way, and how it was cast in the forward."""

    x_SBH: Tensor
    granularity: Granularity
    scale: Tensor | None


Operand = Tensor | Quantised | ToBeCast


def add_weight_gradient(
    weight: PlacedParameter, dy: Tensor | Quantised, x: Operand, gathered: Pending | None, cut: LayerSharding
) -> None:
    """Add dy^T x to the weight's gradient, now or with the weight gradients that are put off, when x is there. Either
    both are in fp8 or to be so, or neither."""

    def add() -> None:
        if gathered is not None:
            gathered.wait()
        if isinstance(dy, Tensor):
            assert isinstance(x, Tensor)
            weight.add_product(dy.flatten(0, 1), x.flatten(0, 1), cut.tp.kind)
            return
        assert not isinstance(x, Tensor)
        cast = x if isinstance(x, Quantised) else cast_as_before(x.x_SBH.flatten(0, 1), x.granularity, x.scale)
        weight.add_float8_product(dy, cast)

    cut.deferred.now_or_later(add)


class _LocalProduct(torch.autograd.Function):
    """The product that a rank computes by itself; of a row-parallel one that is a part, and the caller sums the parts.

    Forward and backward move nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        recipe: InputRecipe | None,
        weight: PlacedParameter,
        cut: LayerSharding,
        owns_input: bool,
    ) -> Tensor:
        ctx.weight, ctx.cut = weight, cut
        y_SBN, cast = product(x_SBH, weight)
        keep_input_or_cast(ctx, x_SBH, recipe, cast, owns_input=owns_input)
        return y_SBN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dy_SBN,) = grads
        weight: PlacedParameter = ctx.weight
        x = kept_input(ctx) if ctx.granularity is None else kept_cast(ctx)
        dx_SBH, of_dy = input_gradient_of(dy_SBN, weight)
        add_weight_gradient(weight, dy_SBN if of_dy is None else of_dy, x, None, cut=ctx.cut)
        return dx_SBH, None, None, None, None
