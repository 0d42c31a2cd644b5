"""How healthy a state is, by the step that led to it, by its weights and by the loss on held-out text."""

import math

import pytest

from shardwright.train.checkpoint.manifest import HEALTHY
from shardwright.train.health.run_health import state_health, step_health
from shardwright.train.health.step_judge import ALL_IS_WELL, WITHOUT_TARGET, Course, Decision
from shardwright.train.train_step import StepResult


def cause_of(loss: float | None, decision: Decision = ALL_IS_WELL, can_fall: bool = False) -> str | None:
    health = step_health(7, StepResult(loss, 1.0, 1e-3), decision, can_fall)
    return None if health is None else health.cause


def test_a_step() -> None:
    assert cause_of(2.0) == ""
    assert cause_of(math.nan) == cause_of(math.inf, Decision(Course.SKIP, "not finite")) == "not finite"
    assert cause_of(2.0, Decision(Course.SKIP, "not finite")) == "not finite"
    assert cause_of(9.0, Decision(Course.GO_ON, "spike")) == cause_of(9.0, Decision(Course.SKIP, "spike")) == "spike"
    assert cause_of(None, WITHOUT_TARGET) is None


def test_overflows_are_the_scales_affair_while_it_can_fall() -> None:
    overflow = Decision(Course.SKIP, "overflow")
    assert cause_of(2.0, overflow, can_fall=True) == ""
    assert cause_of(2.0, overflow, can_fall=False) == "not finite"


@pytest.mark.parametrize("held_out", [None, 2.0])
def test_a_state(held_out: float | None) -> None:
    assert state_health(7, HEALTHY, "", held_out) == HEALTHY
    of_weights = state_health(7, HEALTHY, "weights of rank 0 are not finite", held_out)
    assert of_weights.cause == "not finite" and of_weights.sentence.endswith("after step 7")


@pytest.mark.parametrize("held_out", [math.nan, math.inf])
def test_a_held_out_loss_that_is_no_number(held_out: float) -> None:
    health = state_health(7, HEALTHY, "", held_out)
    assert health.cause == "not finite" and health.sentence == f"the held-out loss is {held_out} after step 7"
