"""The fp8 products of one linear layer, and their state: the cast weight, and past amaxes.

A layer makes one `Float8Linear` and calls `forward_product` and `input_gradient` in its forward and backward; at each
update of the weights `end_step` is called for all layers together. For the weight gradient the layer keeps x, or, if
that product is in fp8 too (float8_gradient.py), the cast of x.

If a matrix is sharded over tp, scales that several shards share need the largest amax of these shards; else results
would depend on tp. A layer is sharded along its outputs (column-parallel: W and dy are sharded) or along its inputs
(row-parallel: W and x are). A scale for the tensor is always shared. A scale for a row is shared only if the row, the
contracted dim, is sharded. Scales of tiles and blocks of 128 are never shared, if the shards are multiples of 128.

Shape suffixes: T tokens, K inputs, N outputs of this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.config.float8_facts import FLOAT8_RECIPES, Float8Facts, serves_both_directions
from shardwright.config.phrase import say
from shardwright.precision.amax_history import AmaxHistory
from shardwright.precision.float8 import DTYPES, E4M3, Granularity, Quantised, amaxes, cast, quantise, scales_for
from shardwright.precision.float8_product import plain_product, product

CutDim = Literal["none", "outputs", "inputs"]
ReduceMax = Callable[[Tensor], Tensor]  # elementwise maximum over some ranks; may work in place


def on_one_rank(amax: Tensor) -> Tensor:
    """The reduction over one rank: the identity."""
    return amax


@dataclass(frozen=True)
class CastWeight:
    """A weight in fp8, for both products. `rows` is W [N, K]. If scales serve only one direction, `columns` is a second
    cast, W^T [K, N], which takes another byte an element."""

    rows: Quantised
    columns: Quantised | None


class Float8Linear:
    """The state of one linear layer's fp8 products. Made by `make_float8_state`."""

    def __init__(
        self,
        recipe: Float8Facts,
        cut_dim: CutDim,
        reduce_max: ReduceMax,
        history: int,
        margin: int,
        weight_gradients: bool = False,
    ) -> None:
        self.recipe = recipe
        self.gradient_dtype = DTYPES[recipe.gradient]
        self.weight_gradients = weight_gradients
        self.num_weight_casts = 0
        # The version of the weights: code that changes them must change it. `end_step` counts it up.
        self.weight_version = 0
        self._weight: CastWeight | None = None
        self._cast_version = 0
        self._weight_amax: Tensor | None = None
        self.cut_dim = cut_dim
        self.reduce_max = reduce_max
        self.histories = {
            "x": AmaxHistory(history, margin, E4M3),
            "weight": AmaxHistory(history, margin, E4M3),
            "dy": AmaxHistory(history, margin, self.gradient_dtype),
        }

    def weight(self, weight_NK: Tensor) -> CastWeight:
        """The weight [N, K] in fp8: cast at the first use of each version, kept until the next."""
        if self._weight is None or self._cast_version != self.weight_version:
            self._weight = None  # frees its memory for the next one
            self._weight = self._cast_weight(weight_NK)
            self._cast_version = self.weight_version
            self.num_weight_casts += 1
        return self._weight

    def hold(self, weight: CastWeight) -> None:
        """Replace the cast of the present version by the same numbers in other memory."""
        self._weight = weight

    def activation(self, x_TK: Tensor) -> Quantised:
        """The input [T, K] in fp8."""
        return self._cast("x", x_TK, E4M3, self.cut_dim == "inputs")

    def gradient(self, dy_TN: Tensor) -> Quantised:
        """The output gradient [T, N] in fp8."""
        return self._cast("dy", dy_TN, self.gradient_dtype, self.cut_dim == "outputs")

    def memory(self) -> list[Tensor]:
        """The memory of the cast weight, if there is one."""
        casts = [] if self._weight is None else [self._weight.rows, self._weight.columns]
        return [tensor for cast in casts if cast is not None for tensor in (cast.values, cast.scales)]

    def drop_weight(self) -> None:
        """Drop the cast weight, when the weight itself is released."""
        self._weight = None

    def weight_changed(self) -> None:
        """Note that the weight's values have changed: it is cast again at the next use."""
        self.weight_version += 1

    def forget_now(self) -> None:
        """Forget the amaxes since the last step: those of an evaluation should not affect the next training step."""
        for history in self.histories.values():
            history.forget_now()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, besides the weights; empty if scales don't depend on past steps."""
        if not self.recipe.delayed:
            return {}
        return {name: history.state_dict() for name, history in self.histories.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, which has other weights."""
        self.weight_version += 1
        if self.recipe.delayed:
            for name, history in self.histories.items():
                history.load_state_dict(state[name])

    def amaxes_now(self) -> list[Tensor | None]:
        """The amaxes of x, weight and dy in the present step; None for a tensor that was not cast."""
        # Not from the weight's history: the weight may have been cast in an evaluation before this step.
        weight_amax = self._weight_amax if self._cast_version == self.weight_version else None
        return [self.histories["x"].now, weight_amax, self.histories["dy"].now]

    def end_step(self, step_amaxes: Sequence[float]) -> None:
        """End a step after the update of the weights. `step_amaxes` are the amaxes of x, weight and dy over all ranks;
        empty if the recipe is not delayed."""
        self.weight_version += 1
        if self.recipe.delayed:
            for history, amax in zip(self.histories.values(), step_amaxes, strict=True):
                history.end_step(amax)

    def _cast_weight(self, weight_NK: Tensor) -> CastWeight:
        granularity = self.recipe.weight
        if not serves_both_directions(granularity):
            rows = self.quantise(weight_NK, granularity, E4M3, self.cut_dim == "inputs")
            columns = self.quantise(weight_NK.t().contiguous(), granularity, E4M3, self.cut_dim == "outputs")
            return CastWeight(rows, columns)
        if self.recipe.delayed:
            rows, self._weight_amax = self._cast_delayed("weight", weight_NK, E4M3, self.cut_dim != "none")
        else:
            rows = self.quantise(weight_NK, granularity, E4M3, self.cut_dim != "none")
        return CastWeight(rows, None)

    def _cast(self, name: str, x: Tensor, dtype: torch.dtype, is_cut: bool) -> Quantised:
        if not self.recipe.delayed:
            return self.quantise(x, self.recipe.activation, dtype, is_cut)
        quantised, amax = self._cast_delayed(name, x, dtype, is_cut)
        self.histories[name].see(amax)
        return quantised

    def _cast_delayed(self, name: str, x: Tensor, dtype: torch.dtype, is_cut: bool) -> tuple[Quantised, Tensor]:
        # Two passes over x. A single pass, chunk by chunk, was not faster: the amax takes an eighth of a cast's time.
        amax = amaxes(x, "tensor")
        scale = self.histories[name].scale
        if scale is None:
            shared_amax = self.reduce_max(amax.clone()) if is_cut else amax
            return cast(x, "tensor", dtype, scales_over_cut(shared_amax, amax, dtype)), amax
        return cast(x, "tensor", dtype, scale + amax * 0.0), amax

    def quantise(self, x: Tensor, granularity: Granularity, dtype: torch.dtype, is_cut: bool) -> Quantised:
        """Cast with scales from the matrix itself and, if it is sharded, from its other shards."""
        if not is_cut or granularity in ("tile", "block"):
            return quantise(x, granularity, dtype)
        amax = amaxes(x, granularity)
        return cast(x, granularity, dtype, scales_over_cut(self.reduce_max(amax.clone()), amax, dtype))


def scales_over_cut(shared_amax: Tensor, own_amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales from the amaxes over all shards of a matrix; nan if this rank's own shard is not finite."""
    # A maximum over ranks may lose a nan, but scales must be nan for parts of the matrix that are not finite.
    return scales_for(shared_amax, dtype) + own_amax * 0.0


def make_float8_state(
    recipe: str,
    cut_dim: CutDim = "none",
    reduce_max: ReduceMax = on_one_rank,
    history: int = 16,
    margin: int = 0,
    weight_gradients: bool = False,
) -> Float8Linear:
    """The state of one linear layer.

    `cut_dim` is the dim along which the weight is sharded over tp, and `reduce_max` reduces over that axis. `history`
    and `margin` are for "delayed" only. `weight_gradients` says that these are in fp8 too. ValueError if the recipe is
    unknown or the history has no length.
    """
    if recipe not in FLOAT8_RECIPES:
        names = tuple(FLOAT8_RECIPES)
        raise ValueError(say("there is no fp8 recipe {recipe}; use one of {names}", recipe=repr(recipe), names=names))
    facts = FLOAT8_RECIPES[recipe]
    return Float8Linear(facts, cut_dim, reduce_max, history, margin=margin, weight_gradients=weight_gradients)


def forward_product(state: Float8Linear, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T in fp8: [T, K] and [N, K] to [T, N], in the dtype of x. `weight_NK` is read only if its version is new."""
    return forward_and_cast(state, x_TK, weight_NK)[0]


def forward_and_cast(state: Float8Linear, x_TK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Quantised]:
    """x W^T in fp8, and x in fp8."""
    x = state.activation(x_TK)
    return product(x, state.weight(weight_NK).rows, x_TK.dtype), x


def input_gradient(state: Float8Linear, dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    """dy W in fp8: [T, N] and [N, K] to [T, K], in the dtype of dy."""
    return input_gradient_and_cast(state, dy_TN, weight_NK)[0]


def input_gradient_and_cast(state: Float8Linear, dy_TN: Tensor, weight_NK: Tensor) -> tuple[Tensor, Quantised]:
    """dy W in fp8, and dy in fp8."""
    dy = state.gradient(dy_TN)
    return product_with_rows_of(state.weight(weight_NK), dy, dy_TN.dtype), dy


def product_with_rows_of(weight: CastWeight, dy: Quantised, out_dtype: torch.dtype) -> Tensor:
    """dy W: [T, N] to [T, K]."""
    if weight.columns is None:
        return plain_product(dy, weight.rows, out_dtype)
    return product(dy, weight.columns, out_dtype)


def step_amaxes(states: Sequence[Float8Linear], reduce_max: ReduceMax, device: torch.device) -> Tensor | None:
    """The amaxes of this step for the histories of these layers, float32 [3 x layers] on a `device`: over all ranks
    that share the layers, dp and tp, by one `reduce_max`. None if no recipe is delayed; then nothing is reduced."""
    now = [amax for state in states if state.recipe.delayed for amax in state.amaxes_now()]
    if not now:
        return None
    zero = torch.zeros((), device=device)  # the amax of a layer that cast nothing
    return reduce_max(torch.stack([zero if amax is None else amax for amax in now]))


def end_step(states: Sequence[Float8Linear], amaxes: Sequence[float] = ()) -> None:
    """End a step after the update of these layers' weights: cast them again at their next use, and advance the
    histories by the numbers of `step_amaxes`. Must be called once a step, not once a microbatch."""
    remaining = iter(amaxes)
    for state in states:
        state.end_step([next(remaining) for _ in state.histories] if state.recipe.delayed else [])
