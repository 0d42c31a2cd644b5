"""Learning rates: what each schedule says of a run's steps, and how the warm-up fits a short run."""

from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import load_job, make_job, read_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.rate_schedules import (
    DECAY_SHAPES,
    RAMP_UP_RULES,
    RATE_SCHEDULES,
    DecayShape,
    RampUpRule,
    RateSchedule,
)
from shardwright.train.train_step import learning_rate

PEAK = 2.0
DECAYS = DECAY_SHAPES.names


def rates(num: int = 100, **fields: Any) -> list[float]:
    spec = OptimizerSpec(learning_rate=PEAK, steps=num, **{"warmup_steps": 10, "min_learning_rate_ratio": 0.1} | fields)
    return [learning_rate(spec, step) for step in range(num + 1)]


@pytest.mark.parametrize("schedule", RATE_SCHEDULES.names)
def test_all_rise_to_the_peak_and_never_again(schedule: str) -> None:
    result = rates(schedule=schedule)
    assert result[:10] == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)])
    assert all(one >= other for one, other in pairwise(result[9:]))
    assert max(result) == pytest.approx(PEAK)
    assert min(result[10:]) >= 0.1 * PEAK * (1 - 1e-12)


def test_each_by_its_formula() -> None:
    assert rates(schedule="constant")[10:] == [PEAK] * 91
    linear, cosine, inverse = (rates(schedule=name) for name in ("linear", "cosine", "inverse-sqrt"))
    assert linear[55] == pytest.approx(PEAK * 0.55) == cosine[55]  # half of the way down
    assert linear[100] == pytest.approx(PEAK * 0.1) == cosine[100]
    assert inverse[39] == pytest.approx(PEAK / 2)  # four times the warm-up


@pytest.mark.parametrize("shape", DECAYS)
def test_wsd_is_constant_and_then_falls(shape: str) -> None:
    result = rates(schedule="wsd", decay_share=0.2, decay_shape=shape)
    assert result[10:81] == [PEAK] * 71
    assert result[100] == pytest.approx(0.1 * PEAK)
    half = {"linear": 0.5, "cosine": 0.5, "sqrt": 1 - 0.5**0.5}[shape]
    assert result[90] == pytest.approx(PEAK * (0.1 + 0.9 * half))


@given(st.sampled_from(["linear", "wsd"]), st.integers(1, 50), st.floats(0.01, 1.0))
def test_the_last_step_has_what_is_left_before_the_floor(schedule: str, num: int, share: float) -> None:
    result = rates(num, schedule=schedule, warmup_steps=0, decay_share=share)
    assert result[num] == pytest.approx(0.1 * PEAK) and result[0] == PEAK


def test_a_rate_follows_the_batch_by_a_rule() -> None:
    for rule, wanted in (("none", 1.0), ("sqrt", 0.5), ("linear", 0.25)):
        spec = OptimizerSpec(learning_rate=PEAK, warmup_steps=0, schedule="constant", batch_rule=rule)
        assert learning_rate(spec, 5, 0.25) == pytest.approx(PEAK * wanted)


@settings(deadline=None)
@given(st.integers(1, 19))
def test_a_short_run_has_a_short_warm_up(steps: int) -> None:
    tenth = -(-steps // 10)
    assert make_job({"optimizer": {"steps": steps}}).optimizer.warmup_steps == tenth
    assert load_job("quickstart", [f"optimizer.steps={steps}"]).optimizer.warmup_steps == tenth
    assert (
        f"the warm-up is {tenth} of the run's {steps} steps, for 20"
        in read_job("quickstart", [f"optimizer.steps={steps}"]).filled_in
    )


def test_what_is_asked_for_is_not_changed() -> None:
    with pytest.raises(PlanError, match=r"warmup_steps 20 is more than optimizer.steps 10"):
        load_job("quickstart", ["optimizer.steps=10", "optimizer.warmup_steps=20"])
    assert load_job("quickstart", ["optimizer.steps=10", "optimizer.warmup_steps=3"]).optimizer.warmup_steps == 3
    assert load_job("yi-34b", ["optimizer.steps=10"]).optimizer.warmup_steps == 1  # of 2,000
    assert read_job("quickstart", []).filled_in == ""


def test_it_is_said() -> None:
    result = CliRunner().invoke(cli, ["estimate", "quickstart", "--set", "optimizer.steps=7"])
    assert result.exit_code == 0 and "the warm-up is 1 of the run's 7 steps" in " ".join(result.output.split())


SCHEDULES = [
    {"schedule": "constant"},
    {"schedule": "cosine"},
    {"schedule": "linear"},
    {"schedule": "inverse-sqrt"},
    {"schedule": "wsd", "decay_share": 0.2},
]


@given(left_out=st.sets(st.integers(0, 39), max_size=20), fields=st.sampled_from(SCHEDULES), warmup=st.integers(0, 12))
def test_steps_that_changed_no_weight_are_not_in_the_schedule(
    left_out: set[int], fields: dict[str, Any], warmup: int
) -> None:
    """The updates that were made have the rates of a job that never had the others, once it is known how many."""
    spec = OptimizerSpec(steps=40, warmup_steps=warmup, learning_rate=PEAK, **fields)
    before = {step: sum(other < step for other in left_out) for step in range(40)}
    made = [step for step in range(40) if step not in left_out]
    for number, step in enumerate(made[:warmup]):
        assert learning_rate(spec, step, left_out=before[step]) == PEAK * (number + 1) / warmup
    all_known = spec.model_copy(update={"steps": 40 - len(left_out)})
    for number, step in enumerate(made):
        if before[step] == len(left_out):
            assert learning_rate(spec, step, left_out=len(left_out)) == learning_rate(all_known, number)


SAWTOOTH = RateSchedule(
    name="sawtooth",
    place=99,
    peak_fraction=lambda spec, step: 1.0 - step % 10 / 10,
    text=lambda spec, floor, falls: "falls to a tenth again and again",
    reads=frozenset(),
)
CUBE = DecayShape(name="cube", place=99, remaining=lambda progress: (1.0 - progress) ** 3)
FOURTH_ROOT = RampUpRule(
    name="fourth-root", place=99, factor=lambda batch_fraction: batch_fraction**0.25, text="follows its fourth root"
)


def test_ones_described_elsewhere_work_with_everything() -> None:
    added = RATE_SCHEDULES.also(SAWTOOTH), DECAY_SHAPES.also(CUBE), RAMP_UP_RULES.also(FOURTH_ROOT)
    with added[0], added[1], added[2]:
        assert rates(schedule="sawtooth")[20:23] == [PEAK, 0.9 * PEAK, 0.8 * PEAK]
        assert rates(schedule="wsd", decay_share=0.2, decay_shape="cube")[90] == pytest.approx(PEAK * (0.1 + 0.9 / 8))
        spec = OptimizerSpec(learning_rate=PEAK, warmup_steps=0, schedule="constant", batch_rule="fourth-root")
        assert learning_rate(spec, 3, batch_share=1 / 16) == PEAK / 2
        sets = ("optimizer.schedule=sawtooth", "optimizer.batch_rule=fourth-root", "cluster.device=h100-sxm")
        explained = CliRunner().invoke(
            cli, ["explain", "quickstart", *(word for field in sets for word in ("--set", field))]
        )
        assert explained.exit_code == 0, explained.output
        assert "falls to a tenth again and again" in " ".join(explained.output.split())
    with pytest.raises(PlanError, match="'inverse-sqrt'"):
        load_job("quickstart", ["optimizer.schedule=sawtooth"])
