"""The loss scale: what it does after any sequence of good steps and overflows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardwright.precision.loss_scale import CEILING, FLOOR, LossScale


class AnyRun(RuleBasedStateMachine):
    """A run of any steps, beside the list of what happened in it, from which the scale is computed anew."""

    @initialize(power=st.integers(-3, 30), growth_steps=st.integers(0, 4))
    def begin(self, power: int, growth_steps: int) -> None:
        self.initial, self.growth_steps = 2.0**power, growth_steps
        self.scale = self.made()
        self.steps: list[bool] = []

    def made(self) -> LossScale:
        return LossScale(self.initial, self.growth_steps, most_skips_in_a_row=10**6)

    @rule(overflowed=st.booleans())
    def step(self, overflowed: bool) -> None:
        self.scale.update(overflowed)
        self.steps.append(overflowed)

    @rule(number=st.integers(1, 12))
    def good_steps(self, number: int) -> None:
        for _ in range(number):
            self.step(False)

    @rule()
    def go_on_from_a_checkpoint(self) -> None:
        state = self.scale.state_dict()
        self.scale = self.made()
        self.scale.load_state_dict(state)
        assert self.scale.state_dict() == state

    @invariant()
    def is_what_the_steps_make_it(self) -> None:
        text = "".join("x" if overflowed else "." for overflowed in self.steps)
        assert self.scale.num_skipped == text.count("x")
        if self.growth_steps == 0:
            assert self.scale.value == self.initial
            return
        # "+" where the scale doubles: each whole group of good steps.
        value = self.initial
        for change in text.replace("." * self.growth_steps, "+").replace(".", ""):
            if change == "+" and value < CEILING:
                value *= 2
            if change == "x" and value > FLOOR:
                value /= 2
        assert self.scale.value == value


TestAnyRun = AnyRun.TestCase


def test_by_hand() -> None:
    scale = LossScale(growth_steps=3)
    values = []
    for overflowed in (True, False, False, True, False, False, False, False, False, False, True):
        scale.update(overflowed)
        values.append(scale.value / 2**14)
    assert values == [2, 2, 2, 1, 1, 1, 2, 2, 2, 4, 2]


@pytest.mark.parametrize(("growth_steps", "ways_out"), [(2000, "scale began at 65536 and is 1.*bf16"), (0, "constant")])
def test_too_many_skips_in_a_row(growth_steps: int, ways_out: str) -> None:
    scale = LossScale(growth_steps=growth_steps, most_skips_in_a_row=20)
    for _ in range(5):  # in all more than 20, but not in a row
        for _ in range(19):
            scale.update(True)
        scale.update(False)
    for _ in range(19):
        scale.update(True)
    with pytest.raises(FloatingPointError, match=f"20 steps in a row.*{ways_out}"):
        scale.update(True)


@given(st.integers(1, 19))
def test_a_checkpoint_keeps_the_count(skips: int) -> None:
    scale, resumed = LossScale(most_skips_in_a_row=20), LossScale(most_skips_in_a_row=20)
    for _ in range(skips):
        scale.update(True)
    resumed.load_state_dict(scale.state_dict())
    for _ in range(19 - skips):
        resumed.update(True)
    with pytest.raises(FloatingPointError):
        resumed.update(True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial": 0.0},
        {"initial": -1.0},
        {"initial": float("inf")},
        {"initial": float("nan")},
        {"growth_steps": -1},
        {"most_skips_in_a_row": 0},
    ],
)
def test_what_makes_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"use|allow"):
        LossScale(**arguments)
