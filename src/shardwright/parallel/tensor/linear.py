"""Tensor parallel: the matrices of a layer, sharded over the tp axis. Shoeybi et al. 2019 (arXiv 1909.08053).

A column-parallel linear layer holds some of the outputs, a row-parallel one some of the inputs. In the pair
row(act(column(x))) no rank needs another rank's intermediate, and one all-reduce at the end is enough. With sequence
parallel (Korthikanti et al. 2022, arXiv 2205.05198) tensors between the pairs are sharded over the sequence, and a
reduce-scatter after a pair and an all-gather before it replace the all-reduce: the same bytes, less memory.

Shape suffixes: S sequence, B batch, H hidden (input width), N output width; s is S / tp if the sequence is sharded,
else S.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded, whole
from shardwright.parallel.tensor.product_input import (
    InputRecipe,
    ProductInput,
    keep_input_or_cast,
    keep_recipe,
    kept_cast,
    kept_input,
    make_again,
    own_part,
    values_and_recipe,
)
from shardwright.precision.float8 import Granularity, Quantised
from shardwright.precision.float8_gradient import cast_as_before
from shardwright.precision.float8_linear import Float8Linear, forward_and_cast, input_gradient_and_cast
from shardwright.precision.float8_product import dequantise
from shardwright.sharding.sequence import Ranges, held_ranges, share_of


@dataclass(frozen=True)
class LayerSharding:
    """The sharding of the layers of one stage: its axes, whether the sequence is sharded over tp between the layers,
    and the place of weight gradients that the schedule defers.

    Each rank of `cp` holds a part of every sequence; `cp_method` says which part, and how attention is computed. Each
    rank of `ep` holds different experts, and the ranks of `expert_tp` share the matrices of each expert. Rows are sent
    to experts in fp8 if `float8_dispatch`.
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
        """A sharding over tp only."""
        return cls(tp, tp.alone("cp"), tp.alone("ep"), tp, sequence_parallel=sequence_parallel)

    @property
    def shards_sequence(self) -> bool:
        """True if a rank holds only a part of the sequence between layers."""
        return self.sequence_parallel and self.tp.size > 1

    @property
    def trades_heads(self) -> bool:
        """True if a rank computes attention over the whole sequence, for some of the heads."""
        return self.cp.size > 1 and CONTEXT_METHODS[self.cp_method].trades_heads

    def held(self, sequence: int) -> Ranges:
        """The positions of this rank's tokens within the layers."""
        return held_ranges(sequence, self.cp.size, self.cp.index, self.cp_method)

    def held_between(self, sequence: int) -> Ranges:
        """The positions of this rank's tokens between the layers."""
        ranges = self.held(sequence)
        return share_of(ranges, self.tp.size, self.tp.index) if self.shards_sequence else ranges

    @property
    def summed_over(self) -> Axis | None:
        """The axis over which gradients of replicated parameters are summed, since each rank sees a part of the tokens;
        None if there is none."""
        return self.tp if self.shards_sequence else None


class LowRank(Protocol):
    """A map that is trained beside a frozen matrix (low_rank.py)."""

    def add_to(self, y_SBN: Tensor, x_sBH: ProductInput) -> Tensor:
        """Add to this rank's result of the matrix, in place, from the matrix's input."""
        ...


class ColumnLinear(nn.Module):
    """x W^T, of which each tp rank computes its share of the outputs.

    The weight's full shape is (*out_shape, in_features); `dim` is the sharded dim of out_shape. Several matrices that
    share their input (query, key and value; gate and up) are one weight, one product and one collective. The result is
    [S, B, N / tp], N = product of out_shape. `owns_input` says that nothing else keeps the input.
    """

    def __init__(
        self,
        in_features: int,
        out_shape: tuple[int, ...],
        dim: int,
        sharding: LayerSharding,
        std: float,
        owns_input: bool = True,
    ) -> None:
        super().__init__()
        self.sharding, self.owns_input = sharding, owns_input
        self.weight = sharded((*out_shape, in_features), dim, sharding.tp, "normal", std=std)
        self.adapter: LowRank | None = None

    def forward(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to [S, B, N / tp]."""
        if self.adapter is not None:  # which keeps the input: the weight is frozen
            y_SBN = _ColumnProduct.apply(values_and_recipe(x_sBH)[0], None, self.weight, self.sharding, False)
            return self.adapter.add_to(y_SBN, x_sBH)
        return _ColumnProduct.apply(*values_and_recipe(x_sBH), self.weight, self.sharding, self.owns_input)


class RowLinear(nn.Module):
    """x W^T, of which each tp rank holds its share of the inputs; the partial products are summed over tp.

    `owns_input` says that nothing else keeps the input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sharding: LayerSharding,
        std: float,
        owns_input: bool = True,
    ) -> None:
        super().__init__()
        self.sharding, self.owns_input = sharding, owns_input
        self.weight = sharded((out_features, in_features), 1, sharding.tp, "normal", std=std)
        # Added once, after the sum. Under sequence parallel each rank adds it to its own tokens only.
        self.bias = whole((out_features,), "zeros", summed_over=sharding.summed_over) if bias else None
        self.adapter: LowRank | None = None

    def forward(self, x_SBH: ProductInput) -> Tensor:
        """[S, B, H / tp] to [s, B, N]."""
        return self.with_bias(sum_of_parts(self.part(x_SBH), self.sharding))

    def part(self, x_SBH: ProductInput) -> Tensor:
        """This rank's part of the sum, [S, B, N], without the bias."""
        if self.adapter is not None:
            part_SBN = local_product(values_and_recipe(x_SBH)[0], self.weight, self.sharding)
            return self.adapter.add_to(part_SBN, x_SBH)
        return local_product(x_SBH, self.weight, self.sharding, self.owns_input)

    def with_bias(self, y_sBN: Tensor) -> Tensor:
        """The sum of all parts, with the bias if there is one."""
        return y_sBN if self.bias is None else y_sBN + self.bias


class ReplicatedLinear(nn.Module):
    """x W^T with a weight that each tp rank holds in full, for the rank's tokens. Moves nothing.

    The ranks' gradients must be summed under sequence parallel, when each rank has a part of the sequence, and also if
    the following layer is sharded; then the caller gives the axis `summed_over`.
    """

    def __init__(
        self, in_features: int, out_features: int, sharding: LayerSharding, std: float, summed_over: Axis | None = None
    ) -> None:
        super().__init__()
        self.sharding = sharding
        axis = summed_over or sharding.summed_over
        self.weight = whole((out_features, in_features), "normal", std, summed_over=axis)

    def forward(self, x_SBH: ProductInput) -> Tensor:
        """[s, B, H] to [s, B, N]."""
        return local_product(x_SBH, self.weight, self.sharding)


def sum_of_parts(part_SBN: Tensor, sharding: LayerSharding) -> Tensor:
    """The sum over tp of the ranks' results of row-parallel products, [s, B, N]."""
    leave = scatter_to if sharding.shards_sequence else reduce_from
    return leave(part_SBN, sharding.tp)


def local_product(
    x_SBH: ProductInput, weight: PlacedParameter, sharding: LayerSharding, owns_input: bool = False
) -> Tensor:
    """x W^T of this rank's tokens with its part of a matrix, [S, B, N]. Moves nothing, forward or backward."""
    return _LocalProduct.apply(*values_and_recipe(x_SBH), weight, sharding, owns_input)


def product(x_SBH: Tensor, weight: PlacedParameter) -> tuple[Tensor, Quantised | None]:
    """x W^T, in fp8 if the weight's products are; and x in fp8, if the weight's gradient is computed from it."""
    weight_NH = weight.matrix(x_SBH.dtype)
    if weight.float8 is None:
        return functional.linear(x_SBH, weight_NH), None
    state = _state(weight)
    y_TN, cast = forward_and_cast(state, x_SBH.flatten(0, 1), weight_NH)
    return y_TN.unflatten(0, x_SBH.shape[:2]), cast if state.weight_gradients else None


def input_gradient_of(dy_SBN: Tensor, weight: PlacedParameter) -> tuple[Tensor, Quantised | None]:
    """dy W, in fp8 if the weight's products are; and dy in fp8, if the weight's gradient is computed from it."""
    weight_NH = weight.matrix(dy_SBN.dtype)
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

    Forward: all-gather of x along the sequence under sequence parallel, else no communication. Only this rank's part of
    x is kept. Backward: the input gradient is all-reduced (reduce-scattered under sequence parallel) while the weight
    gradient is computed; under sequence parallel x, which was not kept, is gathered again meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_sBH: Tensor,
        recipe: InputRecipe | None,
        weight: PlacedParameter,
        sharding: LayerSharding,
        owns_input: bool,
    ) -> Tensor:
        # Not a saved tensor: the weight may be released after the forward, and gathered again into other memory.
        ctx.weight, ctx.sharding = weight, sharding
        x_SBH = all_gather(x_sBH, sharding.tp) if sharding.shards_sequence else x_sBH
        if weight.place.is_frozen:
            ctx.shape = x_sBH.shape
            keep_recipe(ctx, recipe)
            return product(x_SBH, weight)[0]
        y_SBN, cast = product(x_SBH, weight)
        own_cast = cast
        if cast is not None and sharding.shards_sequence:
            own_cast = own_part(cast, sharding.tp.size, sharding.tp.index)
        keep_input_or_cast(ctx, x_sBH, recipe, own_cast, owns_input=owns_input)
        return y_SBN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dy_SBN,) = grads
        weight: PlacedParameter = ctx.weight
        sharding: LayerSharding = ctx.sharding
        shape: torch.Size = ctx.shape
        if weight.place.is_frozen:
            make_again(ctx)
            dx_SBH, _ = input_gradient_of(dy_SBN, weight)
            dx_sBH, reduced = start_sum(dx_SBH, shape, sharding)
            reduced.wait()
            return dx_sBH, None, None, None, None
        operand, gathered = _input_again(ctx, sharding, dy_SBN.dtype)
        dx_SBH, dy_cast = input_gradient_of(dy_SBN, weight)
        dx_sBH, reduced = start_sum(dx_SBH, shape, sharding)
        del dx_SBH
        add_weight_gradient(weight, dy_SBN if dy_cast is None else dy_cast, operand, gathered, sharding=sharding)
        reduced.wait()
        return dx_sBH, None, None, None, None


def _input_again(ctx: Any, sharding: LayerSharding, dtype: torch.dtype) -> tuple["Operand", Pending | None]:
    """The input of a column-parallel product in its backward, and the pending all-gather, if there is one. If the
    sequence is sharded, a cast input is dequantised, gathered, and then cast again as in the forward."""
    if ctx.granularity is None:
        return start_gather_again(kept_input(ctx), sharding)
    if not sharding.shards_sequence:
        return kept_cast(ctx), None
    x_sBH = dequantise(kept_cast(ctx), dtype).view(ctx.shape) if ctx.keeps_cast else kept_input(ctx)
    x_SBH, gathered = start_gather_again(x_sBH, sharding)
    return ToBeCast(x_SBH, ctx.granularity, ctx.scale), gathered


# The backward of column-parallel products, piece by piece; column_products.py has the same for several at once.


def start_gather_again(x_sBH: Tensor, sharding: LayerSharding) -> tuple[Tensor, Pending | None]:
    """The input of a column-parallel product in a backward, [S, B, H], and the pending all-gather after which it is
    complete; None if the sequence is not sharded."""
    if not sharding.shards_sequence:
        return x_sBH, None
    tp = sharding.tp
    x_SBH = x_sBH.new_empty(x_sBH.shape[0] * tp.size, *x_sBH.shape[1:])
    return x_SBH, start_all_gather(x_SBH, x_sBH, tp)


def start_sum(dx_SBH: Tensor, shape: torch.Size, sharding: LayerSharding) -> tuple[Tensor, Pending]:
    """The sum of the ranks' parts of an input gradient, in the shape of x, and the pending collective after which it is
    complete: a reduce-scatter if the sequence is sharded, else an all-reduce."""
    tp = sharding.tp
    if not sharding.shards_sequence:
        return dx_SBH, start_all_reduce(dx_SBH, tp)
    dx_sBH = dx_SBH.new_empty(shape)
    return dx_sBH, start_reduce_scatter(dx_sBH, dx_SBH, tp)


class ToBeCast(NamedTuple):
    """An input that may not have arrived yet, and the parameters of its cast in the forward."""

    x_SBH: Tensor
    granularity: Granularity
    scale: Tensor | None


Operand = Tensor | Quantised | ToBeCast


def add_weight_gradient(
    weight: PlacedParameter, dy: Tensor | Quantised, x: Operand, gathered: Pending | None, sharding: LayerSharding
) -> None:
    """Add dy^T x to the weight's gradient, now or with the deferred weight gradients, once x is `gathered`. Either both
    operands are in fp8, or to be cast to it, or neither is."""

    def add() -> None:
        if gathered is not None:
            gathered.wait()
        if isinstance(dy, Tensor):
            assert isinstance(x, Tensor)
            weight.add_product(dy.flatten(0, 1), x.flatten(0, 1), sharding.tp.kind)
            return
        assert not isinstance(x, Tensor)
        cast = x if isinstance(x, Quantised) else cast_as_before(x.x_SBH.flatten(0, 1), x.granularity, x.scale)
        weight.add_float8_product(dy, cast)

    sharding.deferred.now_or_later(add)


class _LocalProduct(torch.autograd.Function):
    """The product that a rank computes by itself. Of a row-parallel product this is a part, and the caller sums the
    parts. Forward and backward move nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        recipe: InputRecipe | None,
        weight: PlacedParameter,
        sharding: LayerSharding,
        owns_input: bool,
    ) -> Tensor:
        ctx.weight, ctx.sharding = weight, sharding
        if weight.place.is_frozen:
            keep_recipe(ctx, recipe)
            return product(x_SBH, weight)[0]
        y_SBN, cast = product(x_SBH, weight)
        keep_input_or_cast(ctx, x_SBH, recipe, cast, owns_input=owns_input)
        return y_SBN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dy_SBN,) = grads
        weight: PlacedParameter = ctx.weight
        if weight.place.is_frozen:
            make_again(ctx)
            return input_gradient_of(dy_SBN, weight)[0], None, None, None, None
        x = kept_input(ctx) if ctx.granularity is None else kept_cast(ctx)
        dx_SBH, dy_cast = input_gradient_of(dy_SBN, weight)
        add_weight_gradient(weight, dy_SBN if dy_cast is None else dy_cast, x, None, sharding=ctx.sharding)
        return dx_SBH, None, None, None, None
