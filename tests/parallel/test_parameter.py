"""Initial weights are a function of (seed, name, element): any box of any cut is a slice of the same tensor."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.parallel.tensor.parameter import initial_box
from shardwright.sharding.parameter_shard import ParameterShard

CPU = torch.device("cpu")


def place(shape: tuple[int, ...], box: tuple[tuple[int, int], ...] | None = None, name: str = "w") -> ParameterShard:
    return ParameterShard(shape, box or tuple((0, size) for size in shape), "normal", 1.0, name)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((s, draw(st.integers(s + 1, size))) for s, size in zip(starts, shape, strict=True))


@settings(max_examples=100, deadline=None)
@given(boxes(), st.integers(0, 2**63 - 1))
def test_a_box_is_a_slice_of_the_whole(shape_and_box, seed: int) -> None:
    shape, box = shape_and_box
    part = place(shape, box)
    assert torch.equal(initial_box(part, seed, CPU), initial_box(place(shape), seed, CPU)[part.slices])


def test_a_large_tensor_is_cut_like_a_small_one() -> None:
    shape = (700, 800)  # more than one chunk of rows
    part = place(shape, ((100, 650), (13, 790)))
    assert torch.equal(initial_box(part, 3, CPU), initial_box(place(shape), 3, CPU)[part.slices])


def test_values_are_normal_and_independent() -> None:
    values = initial_box(place((1000, 500)), 7, CPU).double()
    n = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    inside = [(values.abs() < k).double().mean().item() for k in (1, 2, 3)]
    assert all(abs(a - b) < 0.003 for a, b in zip(inside, (0.6827, 0.9545, 0.9973), strict=True))
    flat = values.flatten()
    for lag in (1, 2, 500):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 5 / math.sqrt(n)


def test_seed_and_name_both_matter() -> None:
    first = initial_box(place((64, 64)), 1, CPU)
    for other in (initial_box(place((64, 64)), 2, CPU), initial_box(place((64, 64), name="v"), 1, CPU)):
        correlation = (first * other).mean()
        assert abs(correlation) < 5 / 64


def test_values_are_pinned() -> None:
    """Changing the generator would silently change every model: that must be on purpose."""
    values = initial_box(place((2, 3)), 1234, CPU).flatten()
    expected = [-1.09119725, -0.02314836, 0.16467784, -0.12605742, -0.50295639, -0.29406697]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=1e-7)
