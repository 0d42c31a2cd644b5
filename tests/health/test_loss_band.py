"""The band of the loss: silent on losses that fall, stay or jitter, loud on what leaves them upwards."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.train.health.step_judge import LEAST_LOSSES, LossBand

WINDOW, DEVIATIONS = 40, 8.0


def alarms(losses: list[float], band: LossBand | None = None) -> list[int]:
    """Which of the losses, one after the other, are above the band of those before."""
    band = band or LossBand(WINDOW, DEVIATIONS)
    results = []
    for i, loss in enumerate(losses):
        if band.is_above(loss):
            results.append(i)
        band.add(loss)
    return results


def falling(num: int, seed: int, noise: float) -> list[float]:
    """A loss that falls as in training, with noise that is a share of it."""
    rng = random.Random(seed)
    return [(2.0 + 8.0 / (1 + i / 10)) * (1 + noise * max(-2.5, min(2.5, rng.gauss(0, 1)))) for i in range(num)]


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0.0, 0.03))
@settings(deadline=None)
def test_a_loss_that_falls_is_no_spike(seed: int, num: int, noise: float) -> None:
    assert alarms(falling(num, seed, noise)) == []


@given(st.floats(1e-3, 100), st.integers(1, 100), st.floats(-0.01, 0.01))
@settings(deadline=None)
def test_a_flat_loss_is_none_either(height: float, num: int, jump: float) -> None:
    """Nor a small move of one, though its deviation is 0."""
    assert alarms([height] * num + [height * (1 + jump)]) == []


@given(st.integers(0, 2**32), st.integers(60, 200), st.floats(2.0, 1e6))
@settings(deadline=None)
def test_a_spike_is_found_again_and_again(seed: int, num: int, factor: float) -> None:
    losses = falling(num, seed, 0.01)
    losses[-1] = losses[-4] = losses[-7] = factor * losses[0]
    assert alarms(losses) == [num - 7, num - 4, num - 1]


@given(st.integers(0, 2**32), st.integers(60, 200), st.floats(0.0, 0.9))
@settings(deadline=None)
def test_downwards_is_no_spike(seed: int, num: int, factor: float) -> None:
    losses = falling(num, seed, 0.01)
    losses[-1] *= factor
    assert alarms(losses) == []


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=LEAST_LOSSES - 1))
def test_no_verdict_before_enough_losses(losses: list[float]) -> None:
    assert alarms([*losses, 1e300]) == []


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan) | st.just(math.inf), max_size=120), st.integers(0, 120))
@settings(deadline=None)
def test_a_checkpoint_changes_nothing(losses: list[float], cut: int) -> None:
    before, after = LossBand(WINDOW, DEVIATIONS), LossBand(WINDOW, DEVIATIONS)
    for loss in losses[:cut]:
        before.add(loss)
    after.load_state_dict(before.state_dict())
    assert alarms(losses[cut:], before) == alarms(losses[cut:], after)
    assert after.top == pytest.approx(before.top, nan_ok=True)


def test_a_new_height_is_learned() -> None:
    result = alarms([1.0] * WINDOW + [3.0] * WINDOW)
    assert result == list(range(WINDOW, WINDOW + WINDOW // 2))
