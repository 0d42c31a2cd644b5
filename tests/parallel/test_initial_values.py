"""Initial weights are a function of (seed, name, row, column): any part of any cut is a part of the same tensor."""

import hashlib
import math
import os
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.parallel.tensor.initial_values import initial_box, seeded
from shardwright.sharding.parameter_shard import ParameterShard
from support.forked_commands import run_forked

CPU = torch.device("cpu")
NORMAL = NormalDist()
MASK = (1 << 32) - 1
Box = tuple[tuple[int, int], ...]


def place(shape: tuple[int, ...], box: Box | None = None, name: str = "w", std: float = 1.0) -> ParameterShard:
    return ParameterShard(shape, box or tuple((0, size) for size in shape), "normal", std, name)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((s, draw(st.integers(s + 1, size))) for s, size in zip(starts, shape, strict=True))


@settings(max_examples=100, deadline=None)
@given(boxes(), st.integers(0, 2**63 - 1), st.data())
def test_a_part_of_a_box_is_a_part_of_the_whole(shape_and_box, seed: int, data: st.DataObject) -> None:
    shape, box = shape_and_box
    part = place(shape, box)
    expected = initial_box(place(shape), seed, CPU)[part.slices]
    assert torch.equal(initial_box(part, seed, CPU), expected)
    start = data.draw(st.integers(0, part.num_elements))
    stop = data.draw(st.integers(start, part.num_elements))
    out = torch.empty(stop - start)
    seeded(seed)(part, start, out)
    assert torch.equal(out, expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("shape", [(700, 800), (3, 100_000), (250_000,), (90_000, 3)], ids=str)
def test_parts_of_tensors_that_are_larger_than_a_block(shape: tuple[int, ...]) -> None:
    whole = initial_box(place(shape), 3, CPU)
    for cuts in ((0.1, 0.9), (0.3, 0.31)):
        part = place(shape, tuple((int(cuts[0] * n), max(int(cuts[1] * n), 1)) for n in shape))
        assert torch.equal(initial_box(part, 3, CPU), whole[part.slices])
    for start, stop in ((1, 40_000), (123_456, 200_001), (whole.numel() - 1, whole.numel())):
        out = torch.empty(stop - start)
        seeded(3)(place(shape), start, out)
        assert torch.equal(out, whole.view(-1)[start:stop])


def by_hand(seed: int, name: str, row: int, column: int) -> float:
    """One standard normal number, in Python's integers and without lines."""

    def down(x: int, shift: int) -> int:
        return x ^ (x >> shift)

    z = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
    z = (z + row * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = down(z, shift) * factor % 2**64
    x = (column * 0x9E3779B9 + z) & MASK
    x = (down(x, 17) * 0xED5AD4BB + (z >> 32)) & MASK
    x = down(x, 11) * 0xAC4C1B51 & MASK
    x = down(down(x, 15) * 0x31848BAB & MASK, 14)
    if x >= 1 << 31:
        return NORMAL.inv_cdf((2**32 - x) * 2.0**-32)
    return -NORMAL.inv_cdf(x * 2.0**-32)


def test_elements_beyond_four_thousand_million() -> None:
    """The last rows of 256 experts' matrices: numbers of elements take more than 32 bits."""
    shape, std = (256, 4096, 7168), 0.006
    part = place(shape, ((255, 256), (4090, 4096), (7000, 7168)), "layers.3.experts.up", std)
    result = initial_box(part, 11, CPU).double()
    for i, j in ((0, 0), (5, 167), (3, 99)):
        expected = by_hand(11, part.name, 255 * 4096 + 4090 + i, 7000 + j) * std
        assert abs(result[0, i, j].item() - expected) < 3e-6 * std


def test_values_are_what_the_hash_and_the_quantiles_say() -> None:
    result = initial_box(place((40, 50)), 5, CPU)
    expected = torch.tensor([[by_hand(5, "w", i, j) for j in range(50)] for i in range(40)])
    torch.testing.assert_close(result, expected, rtol=0, atol=3e-6)


def blocks_of(num_elements: int, seed: int) -> list[Tensor]:
    """Blocks of a thousand million elements of one tensor, which never exist at once."""
    width, rows = 4096, 1024
    shape = (2**30 // width, width)
    boxes = (((first, first + rows), (0, width)) for first in range(0, num_elements // width, rows))
    return (initial_box(place(shape, box), seed, CPU).view(-1) for box in boxes)


def test_a_hundred_million_values_are_normal() -> None:
    """Moments, the largest and the distance of Kolmogorov and Smirnov, each within what chance allows."""
    n, wanted = 0, 10**8
    powers = torch.zeros(4, dtype=torch.float64)
    largest, smallest = 0.0, 0.0
    edges = torch.linspace(-6, 6, 2401, dtype=torch.float64)
    counts = torch.zeros(2400, dtype=torch.float64)
    for i, block in enumerate(blocks_of(wanted, 7)):
        n += block.numel()
        largest, smallest = max(largest, block.max().item()), min(smallest, block.min().item())
        if i % 8 == 0:  # an eighth of them, for these take longer than the numbers
            x = block.double()
            powers += torch.stack([x.mean(), (x**2).mean(), (x**3).mean(), (x**4).mean()]) * x.numel()
            counts += torch.histogram(block, edges.float()).hist.double()
    assert n > wanted
    num_looked = counts.sum().item()
    mean, square, cube, fourth = (powers / num_looked).tolist()
    for moment, expected, variance in ((mean, 0, 1), (square, 1, 2), (cube, 0, 15), (fourth, 3, 96)):
        assert abs(moment - expected) < 4 * math.sqrt(variance / num_looked)
    distance = (counts.cumsum(0) / num_looked - torch.special.ndtr(edges[1:])).abs().max().item()
    assert distance < 1.95 / math.sqrt(num_looked)  # exceeded by chance once in a thousand times
    # The largest of n exceeds z with probability 1 - (1 - p)^n: between 1 in 1000 and 999 in 1000.
    low, high = (-NORMAL.inv_cdf(-math.log(q) / n) for q in (0.001, 0.999))
    assert low < largest < high and low < -smallest < high
    assert 5.1 < low < 5.5 and 6.1 < high < 6.9


def correlations(a: Tensor, b: Tensor) -> float:
    """The mean product, in standard deviations of what chance gives."""
    return ((a.double() * b.double()).mean() * math.sqrt(a.numel())).item()


def test_neighbours_rows_columns_names_and_seeds_are_not_alike() -> None:
    x = initial_box(place((2000, 1500)), 7, CPU)
    pairs = [(x[:, lag:], x[:, :-lag]) for lag in (1, 2, 3, 16, 256, 1024)]
    pairs += [(x[lag:], x[:-lag]) for lag in (1, 2, 16, 1024)] + [(x[1:, 1:], x[:-1, :-1])]
    others = [initial_box(place((2000, 1500), name=name), seed, CPU) for name, seed in (("w", 8), ("v", 7), ("w", 9))]
    pairs += [(x, other) for other in others] + [(others[0], others[2])]
    pairs += [(x[:, 1:], others[0][:, :-1]), (x[1:], others[1][:-1])]
    scores = [correlations(a, b) for a, b in pairs] + [correlations(a**2 - 1, b**2 - 1) / 2 for a, b in pairs]
    assert max(map(abs, scores)) < 4.5, scores
    assert math.sqrt(sum(score**2 for score in scores) / len(scores)) < 1.6


@pytest.mark.parametrize("rows", [1000, 333])
def test_singular_values_are_those_of_independent_numbers(rows: int) -> None:
    """Marchenko and Pastur 1967: between sqrt(n) - sqrt(m) and sqrt(n) + sqrt(m). Any pattern would stand out."""
    columns = 1000
    x = initial_box(place((5000, 5000), ((77, 77 + rows), (1234, 1234 + columns))), 1, CPU).double()
    values = torch.linalg.svdvals(x)
    edge = math.sqrt(columns) + math.sqrt(rows)
    assert 0.985 * edge < values[0] < 1.01 * edge
    assert values[-1] > 0.95 * (math.sqrt(columns) - math.sqrt(rows))


def test_other_number_types_are_float32_rounded() -> None:
    exact = initial_box(place((300, 200)), 2, CPU).view(-1)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(60_000, dtype=dtype)
        seeded(2)(place((300, 200)), 0, out)
        assert torch.equal(out, exact.to(dtype))


def test_zeros_and_ones() -> None:
    for init, value in (("zeros", 0.0), ("ones", 1.0)):
        out = torch.full((5,), 7.0)
        seeded(0)(ParameterShard((9,), ((2, 8),), init), 1, out)
        assert out.tolist() == [value] * 5


DIGEST = """
import hashlib, sys, torch
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.sharding.parameter_shard import ParameterShard
torch.set_num_threads(int(sys.argv[1]))
digest = hashlib.sha256()
parts = [((1000, 999), ((1, 998), (3, 996))), ((70_000,), ((5, 69_999),)), ((9, 40, 7), ((2, 9), (1, 40), (0, 7)))]
for shape, box in parts:
    values = initial_box(ParameterShard(shape, box, "normal", 0.02, "w"), 12, torch.device("cpu"))
    digest.update(values.numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
"""


@pytest.mark.processes
def test_the_same_bits_with_any_vectors_and_threads() -> None:
    """One digest for all, that of the day they were pinned."""
    result = {}
    for capability, threads in (("default", 1), ("avx2", 1), ("", 2), ("default", 3)):
        environment = dict(os.environ) | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
        done = run_forked(DIGEST, str(threads), environment=environment)
        assert done.returncode == 0, done.stderr
        used, result[capability, threads] = done.stdout.split()
        assert used.lower() == (capability or used.lower())
    assert set(result.values()) == {"2e4efbc67335b61b70b1d6eefbd353359e8a20137fbc643129739113ea1e6e44"}


def test_values_are_pinned() -> None:
    """Changing the generator would silently change every model: that must be on purpose."""
    values = initial_box(place((2, 3)), 1234, CPU).flatten()
    expected = [-1.00411153, 0.43032950, -1.51692724, 0.06826591, -0.10463941, 2.54533005]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=1e-7)
