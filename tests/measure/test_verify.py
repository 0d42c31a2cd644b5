"""The verdict of `verify` on two runs: every difference is seen, and a value that is no number never agrees."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.config.load import make_job
from shardwright.measure.record_files import read_record, write_record
from shardwright.measure.rounding import is_rounding, moved_weights
from shardwright.measure.verdict import Record, Verdict, compare
from shardwright.parallel.tensor.initial_values import initial_box, seeded
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.train_step import StepResult

NAN, INF = math.nan, math.inf
PLACE = ParameterShard((2, 2), ((0, 2), (0, 2)), "normal", 0.02, "layers.0.weight")


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


def test_what_rounding_explains_passes_and_nothing_else() -> None:
    """A difference that moved weights make too, more than a 32nd of it, is rounding; unless everything would be."""
    one = record()
    result = compare([record(weight=1 + 1e-4)], one)
    assert not result.within(1e-5)

    def moved(*weights: float) -> list[Verdict]:
        return [compare([record(weight=weight)], one) for weight in weights]

    assert is_rounding(result, moved(1 + 1e-5, 1 + 1e-5, 1), 1e-5)
    assert not is_rounding(result, moved(1 + 1e-5, 1, 1), 1e-5)  # two of three runs did not move
    assert not is_rounding(result, moved(1 + 1e-6, 1 + 1e-6, 1 + 1e-6), 1e-5)
    assert not is_rounding(result, moved(2, 2, 2), 1e-5)  # such a job proves nothing
    assert not is_rounding(compare([record(losses=(4.0, 3.5))], one), moved(2, 2, 2), 1e-5)
    assert not is_rounding(compare([record(weight=NAN)], one), moved(1 + 1e-5, 1 + 1e-5, 1 + 1e-5), 1e-5)


def test_moved_weights_differ_by_one_rounding() -> None:
    job = make_job({})
    device = torch.device("cpu")
    given = initial_box(PLACE, job.run.seed, device)
    for number in (1, 2):
        write, moved, part = moved_weights(job, seeded(job.run.seed), number), torch.empty(4), torch.empty(3)
        write(PLACE, 0, moved)
        assert ((moved.view(2, 2) / given - 1).abs() <= 2.0**-22).all() and not (moved.view(2, 2) == given).any()
        write(PLACE, 1, part)
        assert torch.equal(part, moved[1:])
        half = replace(PLACE, box=((1, 2), (0, 2)))
        write(half, 0, part[:2])
        assert torch.equal(part[:2], moved[2:])


def test_a_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    places = [
        replace(PLACE, summed_over=("tp",), box=((0, 1), (0, 2))),
        replace(PLACE, name="none", box=((0, 0), (0, 2))),
    ]
    whole = torch.tensor([[0.1, NAN], [-0.0, INF]], dtype=torch.bfloat16)
    left = Record(record(norms=(1.0, None)).steps, [(places[0], whole[1:]), (places[1], whole[:0])], NAN)
    write_record(left, tmp_path, 3)
    result = read_record(tmp_path, 3)
    assert result.steps == left.steps and math.isnan(result.evaluated)
    ((place, values),) = result.boxes  # nothing is left of a box of nothing
    assert place == places[0] and values.dtype == torch.bfloat16
    assert values.view(torch.int16).tolist() == whole[1:].view(torch.int16).tolist()
