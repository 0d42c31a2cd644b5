"""Compressed reductions against references of one process, in numpy."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from support.compressed import (
    LARGE,
    NUM_STEPS,
    PADDING,
    PLANS,
    SHAPES,
    SMALL,
    WITH_FEEDBACK,
    WORLDS,
    bucket,
    exact_sum,
    gradient,
    large_gradients,
    large_part,
    layout,
    num_elements,
    outcomes,
    views_of,
)


def quantised(x: np.ndarray) -> np.ndarray:
    """The values that arrive of a vector of whole blocks."""
    out = np.empty_like(x)
    for begin in range(0, len(x), 256):
        block = x[begin : begin + 256]
        scale = np.abs(block).max() / np.float32(127)
        out[begin : begin + 256] = np.rint(block / scale) * scale if scale else 0
    return out


def int8_reference(world: int) -> Iterator[np.ndarray]:
    """Each step's sum of the large elements: every rank quantises, then the rank that serves a share does."""
    count = len(large_gradients(world, 0)[0])
    share = -(-count // (world * 256)) * 256
    lost = np.zeros((world, world * share), np.float32)
    lost_in_sums = np.zeros(world * share, np.float32)
    for step in range(NUM_STEPS):
        total = np.zeros(world * share, np.float32)
        for rank, own in enumerate(large_gradients(world, step)):
            lost[rank, :count] += own
            sent = quantised(lost[rank])
            lost[rank] -= sent
            total += sent
        total += lost_in_sums
        served = quantised(total)
        lost_in_sums = total - served
        yield served[:count]


def scattered_int8_reference(world: int) -> Iterator[np.ndarray]:
    """Each step's sum of the whole bucket, small tensors left out: blocks begin anew with each share."""
    length = num_elements() // world
    padded = -(-length // 256) * 256
    lost = np.zeros((world, world, padded), np.float32)
    for step in range(NUM_STEPS):
        total = np.zeros((world, padded), np.float32)
        for rank in range(world):
            flat, tensors = bucket(gradient(rank, step))
            for i in SMALL:
                tensors[i].zero_()
            lost[rank, :, :length] += flat.view(world, length).numpy()
            sent = quantised(lost[rank].reshape(-1)).reshape(world, padded)
            lost[rank] -= sent
            total += sent
        yield total[:, :length].reshape(-1)


def topk_reference(world: int, share: float) -> Iterator[np.ndarray]:
    lost: list[np.ndarray] = [np.zeros_like(g) for g in large_gradients(world, 0)]
    for step in range(NUM_STEPS):
        total = np.zeros_like(lost[0])
        for rank, own in enumerate(large_gradients(world, step)):
            lost[rank] = lost[rank] + own
            sent = np.argsort(-np.abs(lost[rank]))[: math.ceil(share * len(own))]
            total[sent] += lost[rank][sent]
            lost[rank][sent] = 0
        yield total


def powersgd_reference(world: int, which: int, seed: int, rank: int) -> Iterator[np.ndarray]:
    """One matrix of the sums over ranks, float64: the sum of the errors is the error of the sum."""
    rows, columns = math.prod(SHAPES[which][:-1]), SHAPES[which][-1]
    q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed)).double().numpy()
    lost = np.zeros((rows, columns))
    for step in range(NUM_STEPS):
        m = views_of(exact_sum(world, step))[which].reshape(rows, columns).numpy() + lost
        p = np.linalg.qr(m @ q)[0]
        q = m.T @ p
        lost = m - p @ q.T
        yield p @ q.T


# --- results ---


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_have_the_same_bits(name: str, world: int) -> None:
    first, *others = (by_method[name, False].results for by_method in outcomes(world))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_cast_sum_is_rounded_once(name: str, world: int) -> None:
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    for step, result in enumerate(outcomes(world)[0][name, False].results):
        cast = sum(bucket(gradient(rank, step))[0].to(dtype).double() for rank in range(world))
        assert isinstance(cast, torch.Tensor)
        np.testing.assert_array_equal(large_part(result), large_part(cast.float().to(dtype).float()))


@pytest.mark.parametrize("world", WORLDS)
def test_int8_does_what_a_serial_simulation_does(world: int) -> None:
    for result, reference in zip(outcomes(world)[0]["int8", False].results, int8_reference(world), strict=True):
        np.testing.assert_array_equal(large_part(result), reference)


@pytest.mark.parametrize("world", WORLDS)
def test_topk_does_what_a_serial_simulation_does(world: int) -> None:
    reference = topk_reference(world, PLANS["topk"].compress_share)
    for result, expected in zip(outcomes(world)[0]["topk", False].results, reference, strict=True):
        np.testing.assert_array_equal(large_part(result), expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("which", "seed"), [(1, 0), (2, 1)])
def test_powersgd_does_what_a_serial_simulation_does(which: int, seed: int, world: int) -> None:
    reference = powersgd_reference(world, which, seed, PLANS["powersgd"].compress_rank)
    for result, expected in zip(outcomes(world)[0]["powersgd", False].results, reference, strict=True):
        results = views_of(result)[which].reshape(expected.shape).double().numpy()
        assert np.linalg.norm(results - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PLANS)
def test_small_tensors_travel_as_they_are(name: str, world: int) -> None:
    as_they_are = [*SMALL, 4] if name == "powersgd" else SMALL
    for step, result in enumerate(outcomes(world)[0][name, False].results):
        views, exact = views_of(result), views_of(exact_sum(world, step))
        for i in as_they_are:
            torch.testing.assert_close(views[i].double(), exact[i], rtol=0, atol=0 if i in SMALL else 1e-7)
        assert torch.equal(result[-1], torch.tensor(PADDING))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PLANS)
def test_shares_of_a_scattered_bucket(name: str, world: int) -> None:
    by_rank = [by_method[name, True].results for by_method in outcomes(world)]
    whole = outcomes(world)[0][name, False].results
    for step in range(NUM_STEPS):
        joined = torch.cat([results[step] for results in by_rank])
        exact = exact_sum(world, step)
        for i in SMALL:
            assert torch.equal(views_of(joined)[i].double(), views_of(exact)[i])
        if name in ("powersgd", "topk"):
            assert all(torch.equal(a, b) for a, b in zip(views_of(joined), views_of(whole[step]), strict=True))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_scattered_cast_sum_is_not_rounded_again(name: str, world: int) -> None:
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    for step in range(NUM_STEPS):
        joined = torch.cat([by_method[name, True].results[step] for by_method in outcomes(world)])
        cast = sum(bucket(gradient(rank, step))[0].to(dtype).double() for rank in range(world))
        assert isinstance(cast, torch.Tensor)
        np.testing.assert_allclose(large_part(joined), large_part(cast.float()), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_scattered_int8_does_what_a_serial_simulation_does(world: int) -> None:
    for step, expected in enumerate(scattered_int8_reference(world)):
        joined = torch.cat([by_method["int8", True].results[step] for by_method in outcomes(world)])
        np.testing.assert_array_equal(large_part(joined), large_part(torch.from_numpy(expected)))


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_is_lost_is_sent_later(name: str, world: int, scatter: bool) -> None:
    """All results together, and the last errors of all ranks, are the sum of all gradients, element by element."""
    of_ranks = [by_method[name, scatter] for by_method in outcomes(world)]
    sent = torch.zeros(num_elements(), dtype=torch.float64)
    for step in range(NUM_STEPS):
        sent += torch.cat([rank.results[step] for rank in of_ranks]) if scatter else of_ranks[0].results[step]
    wanted = sum(exact_sum(world, step).double() for step in range(NUM_STEPS))
    lost, offsets = torch.zeros_like(sent), layout(world, 0, scatter).offsets
    for rank in of_ranks:
        for run in rank.errors:
            start = offsets[run.number] + run.first
            lost[start : start + run.values.numel()] += run.values
    sent, lost, wanted = (
        torch.cat([views_of(flat)[i].reshape(-1) for i in (LARGE[:2] if name == "powersgd" else LARGE)])
        for flat in (sent, lost, wanted)
    )
    assert (sent - wanted).norm() > 1e-3 * wanted.norm()  # something is lost indeed
    torch.testing.assert_close(sent + lost, wanted, rtol=0, atol=1e-5)
