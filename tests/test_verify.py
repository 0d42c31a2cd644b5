"""What `verify` says of two runs: every difference is seen, and what is no number is no agreement."""

import math
from dataclasses import replace

import pytest
import torch

from shardwright.measure.verify import Record, compare
from shardwright.spec.place import Place
from shardwright.train.step import StepResult

NAN, INF = math.nan, math.inf
PLACE = Place((2, 2), ((0, 2), (0, 2)), "normal", 0.02, "layers.0.weight")


def record(
    losses: tuple[float, ...] = (4.0, 3.0), norms: tuple[float | None, ...] = (1.0, 2.0), weight: float = 1.0,
    evaluated: float = 3.5,
) -> Record:  # fmt: skip
    steps = [StepResult(loss, norm, 1e-3, skipped=norm is None) for loss, norm in zip(losses, norms, strict=True)]
    return Record(steps, [(PLACE, torch.full((2, 2), weight))], evaluated)


def test_equal_runs_are_equal_bit_for_bit() -> None:
    verdict = compare([record(), record()], record())
    assert verdict.bitwise and verdict.within(0.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("is_both", [False, True], ids=["in the plan", "in both"])
def test_what_is_no_number_is_no_agreement(bad: float, is_both: bool) -> None:
    for changed in (
        {"losses": (4.0, bad)}, {"losses": (bad, 3.0)}, {"norms": (1.0, bad)}, {"norms": (bad, 1.0)}, {"weight": bad},
        {"evaluated": bad},
    ):  # fmt: skip
        broken = record(**changed)  # type: ignore[arg-type]
        verdict = compare([record(), broken], broken if is_both else record())
        assert not verdict.within(1e9), changed
        assert not verdict.bitwise


def test_each_difference_is_seen() -> None:
    one = record()
    assert compare([record(losses=(4.0, 3.25))], one).max_loss_difference == 0.25
    assert compare([record(evaluated=3.75)], one).max_loss_difference == 0.25
    assert compare([record(norms=(1.0, 3.0))], one).max_grad_norm_relative_difference == 0.5
    assert compare([record(weight=1.5)], one).max_parameter_relative_difference == pytest.approx(0.5)
    assert not any(compare([record(**c)], one).bitwise for c in ({"weight": 1.5}, {"evaluated": 3.75}))  # type: ignore[arg-type]


def test_a_step_that_one_side_left_out_is_a_difference() -> None:
    left_out = record(norms=(1.0, None))
    assert not compare([left_out], record()).within(1e9)
    assert not compare([record()], left_out).within(1e9)
    assert compare([left_out], left_out).within(0.0)


def test_a_norm_of_zero_divides_nothing() -> None:
    still = record(norms=(0.0, 0.0))
    assert compare([still], still).within(0.0)
    assert compare([record()], still).max_grad_norm_relative_difference == INF


def test_fewer_steps_are_refused() -> None:
    short = replace(record(), steps=record().steps[:1])
    with pytest.raises(ValueError, match="longer"):
        compare([short], record())
