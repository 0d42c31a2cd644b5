"""fp8 layers: the error of each recipe, shards against the whole, and what a layer remembers from step to step."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.precision.amax_history import AmaxHistory
from shardwright.precision.float8 import DTYPES, E4M3, E5M2, Quantised, transposed
from shardwright.precision.float8_linear import (
    CastWeight,
    CutDim,
    Float8Linear,
    ReduceMax,
    forward_product,
    input_gradient,
    make_float8_state,
)
from shardwright.precision.float8_product import dequantise
from support.float8_reference import end_step, random, rounding_bound, scale_for, scales_by_element
from support.rank_threads import on_two_ranks

NAMES = list(FLOAT8_RECIPES)


# --- recipes ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_errors_of_products_are_those_of_the_casts(name: str, wide: torch.dtype) -> None:
    recipe, state = FLOAT8_RECIPES[name], make_float8_state(name)
    x, w, dy = random(40, 260).to(wide), random(140, 260, seed=1), random(40, 140, seed=2).to(wide)
    y, dx = forward_product(state, x, w), input_gradient(state, dy, w)
    assert (y.dtype, dx.dtype) == (wide, wide)
    for left, right, dtype, result in ((x, w, E4M3, y), (dy, w.t(), DTYPES[recipe.gradient], dx)):
        a, b = left.double().numpy(), right.double().numpy()
        error_a = rounding_bound(a, scales_by_element(a, recipe.activation, dtype), dtype)
        error_b = rounding_bound(b, scales_by_element(b, recipe.weight, E4M3), E4M3)
        bound = error_a @ np.abs(b).T + np.abs(a) @ error_b.T + error_a @ error_b.T
        exact = a @ b.T
        error = np.abs(result.double().numpy() - exact)
        assert (error <= bound * 1.001 + np.abs(exact) * 2.0**-8 * (wide == torch.bfloat16)).all()
        assert np.linalg.norm(error) < 0.1 * np.linalg.norm(exact)
        assert np.linalg.norm(error) > 1e-3 * np.linalg.norm(exact)  # it is fp8


def columns_of(weight: CastWeight) -> Quantised:
    return weight.columns or transposed(weight.rows)


def test_gradients_have_the_wider_range_unless_tiles_do_without() -> None:
    result = {}
    for name in NAMES:
        state = make_float8_state(name)
        weight = state.weight(random(16, 32))
        operands = state.activation(random(4, 32)), weight.rows, columns_of(weight), state.gradient(random(4, 16))
        result[name] = [operand.values.dtype for operand in operands]
    hybrid = [E4M3, E4M3, E4M3, E5M2]
    assert result == {"tensorwise": hybrid, "delayed": hybrid, "rowwise": hybrid, "blockwise": [E4M3] * 4}


def test_finer_scales_are_better_with_outliers() -> None:
    # Four channels, all in one tile, are 2^15 times what the others are, and two tokens 2^4 times what the others are.
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 512, generator=generator), torch.randn(32, 512, generator=generator)
    x[:2] *= 2.0**4
    x[:, :4] *= 2.0**15
    w[:, :4] = 0  # so that what the others lose is seen
    exact = x.double() @ w.double().t()
    errors = {}
    for name in ("tensorwise", "rowwise", "blockwise"):
        y = forward_product(make_float8_state(name), x, w)
        errors[name] = float((y - exact)[2:].norm() / exact[2:].norm())
    assert errors["blockwise"] < 0.1
    assert errors["blockwise"] < 0.7 * errors["rowwise"]
    assert errors["rowwise"] < 0.5 * errors["tensorwise"]


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="'columnwise'; use one of delayed, tensorwise"):
        make_float8_state("columnwise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length of at least 1"):
        make_float8_state("delayed", history=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [0, 1])
def test_an_overflow_comes_out_of_the_products(name: str, step: int, bad: float) -> None:
    # On one of two ranks, whose maximum may lose a nan.
    state = make_float8_state(name, "inputs", lambda amax: amax.nan_to_num(1.0, 1.0))
    x, w, dy = random(4, 64), random(48, 64, seed=1), random(4, 48, seed=2)
    for _ in range(step):
        forward_product(state, x, w)
        input_gradient(state, dy, w)
        end_step([state])
    assert forward_product(state, x, w).isfinite().all()
    assert input_gradient(state, dy, w).isfinite().all()
    x[2, 3] = dy[1, 5] = bad
    assert forward_product(state, x, w)[2].isnan().all()
    assert input_gradient(state, dy, w)[1].isnan().all()


# --- tensor parallel ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", ["outputs", "inputs"])
def test_shards_are_cast_as_the_whole(name: str, cut: CutDim) -> None:
    num_steps = 3
    xs = [random(24, 512, seed=10 + i) for i in range(num_steps)]
    ws = [random(256, 512, seed=20 + i) for i in range(num_steps)]
    dys = [random(24, 256, seed=30 + i) for i in range(num_steps)]
    whole = make_float8_state(name)

    def shard(x: Tensor, dim: int | None, index: int) -> Tensor:
        return x if dim is None else x.chunk(2, dim)[index]

    dims = {"x": None, "w": 0, "dy": 1} if cut == "outputs" else {"x": 1, "w": 1, "dy": None}

    def cast_all(state: Float8Linear, index: int, reduce_max: ReduceMax | None) -> list[list[Tensor]]:
        steps = []
        for i in range(num_steps):
            x, w, dy = xs[i], ws[i], dys[i]
            if reduce_max is not None:
                x, w, dy = shard(x, dims["x"], index), shard(w, dims["w"], index), shard(dy, dims["dy"], index)
            operands = [state.activation(x), state.weight(w).rows, columns_of(state.weight(w)), state.gradient(dy)]
            steps.append([dequantise(operand, torch.float32) for operand in operands])
            end_step([state], reduce_max) if reduce_max is not None else end_step([state])
        return steps

    expected = cast_all(whole, 0, None)
    result = on_two_ranks(lambda i, reduce_max: cast_all(make_float8_state(name, cut, reduce_max), i, reduce_max))
    columns_dim = None if dims["w"] is None else 1 - dims["w"]
    for index in range(2):
        for i in range(num_steps):
            for dim, part, all_of_it in zip(
                (dims["x"], dims["w"], columns_dim, dims["dy"]), result[index][i], expected[i], strict=True
            ):
                assert torch.equal(part, shard(all_of_it, dim, index))


def test_what_is_shared_over_the_cut() -> None:
    shapes: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name in NAMES:
        for cut in ("none", "outputs", "inputs"):
            asked = shapes[name, cut] = []

            def reduce_max(amax: Tensor, asked: list[tuple[int, ...]] = asked) -> Tensor:
                asked.append(tuple(amax.shape))
                return amax

            state = make_float8_state(name, cut, reduce_max)
            for i in range(2):
                forward_product(state, random(6, 32), random(16, 32))
                input_gradient(state, random(6, 16), random(16, 32))
                if i == 0:
                    end_step([state])
    once: list[tuple[int, ...]] = [(), ()]  # what is cut: the weight, and either x or dy
    assert shapes == {
        **{(name, "none"): [] for name in NAMES},
        ("tensorwise", "outputs"): once * 2,
        ("tensorwise", "inputs"): once * 2,
        ("delayed", "outputs"): once,  # in the first step alone
        ("delayed", "inputs"): once,
        ("rowwise", "outputs"): [(32, 1), (6, 1)] * 2,  # columns of the weight; tokens of dy
        ("rowwise", "inputs"): [(6, 1), (16, 1)] * 2,  # tokens of x; rows of the weight
        ("blockwise", "outputs"): [],
        ("blockwise", "inputs"): [],
    }


# --- the weight ---


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_cast_once_a_step(name: str) -> None:
    state = make_float8_state(name)
    x, dy, w = random(4, 48), random(4, 32), random(32, 48)

    def step() -> list[Tensor]:
        """Four microbatches: the sum of what they gave."""
        return [
            sum((forward_product(state, x * i, w) for i in range(4)), torch.zeros(4, 32)),
            sum((input_gradient(state, dy * i, w) for i in range(4)), torch.zeros(4, 48)),
        ]

    before = step()
    assert state.num_weight_casts == 1
    end_step([state])
    w = w * 2
    twice = step()
    assert state.num_weight_casts == 2
    assert all(not torch.equal(old, new) for old, new in zip(before, twice, strict=True))
    w = w * 3
    assert all(torch.equal(old, new) for old, new in zip(twice, step(), strict=True))  # it was not told
    assert state.num_weight_casts == 2
    state.weight_version += 1
    assert all(not torch.equal(old, new) for old, new in zip(twice, step(), strict=True))
    state.load_state_dict(state.state_dict())  # the weights come from the checkpoint as well
    step()
    assert state.num_weight_casts == 4


# --- delayed scaling ---


def amax_matrix(amax: float) -> Tensor:
    return torch.tensor([[amax, -amax / 2], [0.0, amax / 4]])


def test_delayed_scaling_step_by_step() -> None:
    state = make_float8_state("delayed", history=2, margin=1)
    weight = amax_matrix(3.0)

    def step(*of_microbatches: float) -> list[float]:
        """Scales of x in a step whose microbatches have these amaxes."""
        scales = []
        for amax in of_microbatches:
            scales.append(float(state.activation(amax_matrix(amax)).scales))
            state.gradient(amax_matrix(100 * amax))
            state.weight(weight)
        end_step([state])
        return scales

    room = 2.0
    # Nothing is known: each has its own scale, without room.
    assert step(1.0, 64.0) == [scale_for(1.0, E4M3), scale_for(64.0, E4M3)]
    # The largest of the microbatches was one entry; what comes meanwhile changes nothing.
    assert step(5.0, 900.0, 7.0) == [room * scale_for(64.0, E4M3)] * 3
    assert step(6.0) == [room * scale_for(900.0, E4M3)]
    assert step(8.0) == [room * scale_for(900.0, E4M3)]  # the largest of two steps
    assert float(state.gradient(amax_matrix(1.0)).scales) == room * scale_for(800.0, E5M2)
    assert float(state.weight(weight).rows.scales) == room * scale_for(3.0, E4M3)
    assert step(0.0) == [room * scale_for(8.0, E4M3)]
    assert step(0.0) == [room * scale_for(8.0, E4M3)]
    assert step(0.0) == [room * scale_for(8.0, E4M3)]  # zeros alone: as it was
    assert np.isnan(step(float("inf"))).all()
    assert step(2.0) == [room * scale_for(8.0, E4M3)]  # infinity left nothing
    assert step(3.0) == [room * scale_for(2.0, E4M3)]


def test_what_exceeds_a_delayed_scale_saturates() -> None:
    state = make_float8_state("delayed")
    state.activation(amax_matrix(1.0))
    end_step([state])
    scale = scale_for(1.0, E4M3)
    result = dequantise(state.activation(torch.tensor([[1000.0, -1000.0, 0.5]])), torch.float32)
    assert result.tolist() == [[448 * scale, -448 * scale, 0.5]]


def test_evaluation_leaves_no_trace() -> None:
    states = [make_float8_state("delayed") for _ in range(2)]
    for i in range(3):
        for state, evaluates in zip(states, (False, True), strict=True):
            if evaluates:
                forward_product(state, random(4, 48) * 1000, random(32, 48, seed=i))
                state.forget_now()
            forward_product(state, random(4, 48), random(32, 48, seed=i))
            input_gradient(state, random(4, 32), random(32, 48, seed=i))
            end_step([state])
    assert states[0].state_dict() == states[1].state_dict()


def test_steps_end_with_one_reduction() -> None:
    states = [make_float8_state(name) for name in ("delayed", "rowwise", "delayed")]
    forward_product(states[0], amax_matrix(4.0), amax_matrix(8.0))
    input_gradient(states[2], amax_matrix(6.0), amax_matrix(7.0))
    asked: list[list[float]] = []

    def largest(amax: Tensor) -> Tensor:
        asked.append(amax.tolist())
        return amax.clamp(min=5.0)

    end_step(states, largest)
    assert asked == [[4.0, 8.0, 0.0, 0.0, 7.0, 6.0]]
    assert [state.weight_version for state in states] == [1, 1, 1]
    past = [{name: part["past"] for name, part in states[i].state_dict().items()} for i in (0, 2)]
    assert past == [{"x": [5.0], "weight": [8.0], "dy": [5.0]}, {"x": [5.0], "weight": [7.0], "dy": [6.0]}]
    asked.clear()
    end_step(states[1:2], largest)
    assert asked == []


@given(
    st.lists(st.one_of(st.floats(0, 2.0**100, width=32), st.just(float("inf"))), max_size=12),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_a_history_goes_on_from_a_checkpoint(steps: list[float], length: int, at: int) -> None:
    straight, before = AmaxHistory(length, 0, E5M2), AmaxHistory(length, 0, E5M2)
    for amax in steps:
        straight.end_step(amax)
    for amax in steps[:at]:
        before.end_step(amax)
    after = AmaxHistory(length, 0, E5M2)
    after.load_state_dict(before.state_dict())
    for amax in steps[at:]:
        after.end_step(amax)
    assert after.state_dict() == straight.state_dict()
    assert after.scale == straight.scale
    # By the definition: the largest of the last ones; if they are all 0, of the last ones that were not.
    finite = [0.0 if amax == float("inf") else amax for amax in steps]
    windows = [max(finite[max(0, end - length) : end]) for end in range(1, len(finite) + 1)]
    known = [largest for largest in windows if largest > 0]
    assert straight.scale == (scale_for(known[-1], E5M2) if known else None)


def test_a_shorter_history_keeps_the_newest() -> None:
    long, short = AmaxHistory(3, 0, E4M3), AmaxHistory(2, 0, E4M3)
    for amax in (900.0, 5.0, 6.0):
        long.end_step(amax)
    short.load_state_dict(long.state_dict())
    assert short.state_dict()["past"] == [5.0, 6.0]
    assert short.scale == scale_for(6.0, E4M3)


# --- training ---


class Fp8Product(torch.autograd.Function):
    """A layer as it will be wired: fp8 forward and input gradient, weight gradient as it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, state: Float8Linear) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.state = state
        return forward_product(state, x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return input_gradient(ctx.state, grads[0], w), grads[0].t() @ x, None


def trained(name: str | None) -> float:
    """Loss of a small network after 60 steps of two microbatches."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(96, 40), (96, 96), (8, 96)]
    weights = [torch.randn(s, generator=generator).div_(s[1] ** 0.5).requires_grad_() for s in shapes]
    teacher = torch.randn(8, 40, generator=generator) / 40**0.5
    states = [make_float8_state(name) for _ in weights] if name else []
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    for _ in range(60):
        total = 0.0
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(64, 40, generator=generator)
            h = x
            for i, w in enumerate(weights):
                h = Fp8Product.apply(h, w, states[i]) if states else functional.linear(h, w)
                h = functional.silu(h) if i < 2 else h
            loss = functional.mse_loss(h, (x @ teacher.t()).tanh())
            (loss / 2).backward()
            total += loss.item() / 2
        optimizer.step()
        end_step(states)
    return total


@pytest.mark.long
def test_training_goes_as_in_float32() -> None:
    exact = trained(None)
    assert exact < 0.1  # it learns: it began near 0.8
    for name in NAMES:
        loss = trained(name)
        assert loss != exact
        assert loss == pytest.approx(exact, rel=0.15), name
