"""Decisions of the judge under each policy, how often in a row, and its state after a rewind and a checkpoint."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.health import HealthSpec
from shardwright.config.load import make_job
from shardwright.train.health.step_judge import Course, StepJudge

NAN, INF = math.nan, math.inf


def judge(scales_loss: bool = False, can_skip: bool = True, **health: Any) -> StepJudge:
    return StepJudge(HealthSpec(**health), 1e-3, scales_loss, can_skip)


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (NAN, None)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_not_finite_goes_by_its_policy(loss: float, norm: float | None, policy: Any) -> None:
    decision = judge(not_finite=policy)(4, loss, norm)
    assert (decision.course.value, decision.cause) == (policy, "not finite")
    assert f"the loss is {loss} in step 5{'' if norm is None else f' (gradient norm {norm})'}; " in decision.sentence


def test_weights_that_are_not_finite_go_by_the_same_policy() -> None:
    """They are found after an update that nobody was asked for, and after a rewind no update can be left out."""
    assert judge(can_skip=False).weights_not_finite(4).course is Course.STOP
    judges = judge(not_finite="rewind", can_skip=False)
    decision = judges.weights_not_finite(4)
    assert (decision.course, decision.step, judges.counts.not_finite) == (Course.REWIND, 4, 1)
    judges.rewound(4)
    assert judges.weights_not_finite(4).course is Course.STOP


@pytest.mark.parametrize("policy", ["tell", "skip", "rewind", "stop", "ignore"])
def test_a_spike_goes_by_its_policy(policy: Any) -> None:
    asked = judge(spike=policy)
    for step in range(20):
        assert asked(step, 2.0, 1.0).course is Course.GO_ON
    decision = asked(20, 9.0, 1.0)
    courses = {"tell": Course.GO_ON, "ignore": Course.GO_ON}
    assert decision.course is courses.get(policy) or decision.course.value == policy
    assert asked.counts.spikes == (policy != "ignore")
    assert ("a spike" in decision.sentence) == (policy != "ignore")


def test_a_good_step_breaks_the_row_of_skips() -> None:
    asked = judge(not_finite="skip", most_skips=2)
    courses = [asked(i, loss, 1.0).course.value for i, loss in enumerate([NAN, NAN, 1.0, NAN, NAN, NAN])]
    assert courses == ["skip", "skip", "go on", "skip", "skip", "stop"]
    assert asked.counts.skipped_not_finite == 4
    assert asked.counts.not_finite == 5


def test_a_scaled_loss_may_overflow_whatever_the_policy() -> None:
    asked = judge(scales_loss=True, most_skips=1)
    for step in range(5):
        decision = asked(step, 2.0, INF)
        assert (decision.course, decision.cause, decision.sentence) == (Course.SKIP, "overflow", "")
    assert asked.counts.overflows == 5
    assert asked(5, NAN, NAN).course is Course.STOP


def test_after_a_rewind_the_step_is_left_out() -> None:
    """Whatever the checkpoint knew of it; another step is undone again."""
    asked = judge(not_finite="rewind")
    saved = json.loads(json.dumps(asked.state_dict()))
    assert asked(7, NAN, NAN).course is Course.REWIND
    asked.load_state_dict(saved)
    asked.rewound(7)
    assert asked(7, NAN, NAN).course is Course.SKIP
    assert asked(8, NAN, NAN).course is Course.REWIND
    assert (asked.counts.rewinds, asked.counts.not_finite) == (1, 3)
    other = judge(not_finite="rewind")
    other.load_state_dict(json.loads(json.dumps(asked.state_dict())))
    assert other(7, NAN, NAN).course is Course.SKIP
    assert (other.counts.rewinds, other.counts.not_finite) == (1, 4)


def test_what_was_updated_with_is_not_left_out() -> None:
    asked = judge(can_skip=False, not_finite="rewind", spike="rewind")
    for step in range(20):
        asked(step, 2.0, None)
    asked.rewound(20)
    assert asked(20, 9.0, None).course is Course.GO_ON
    assert asked(20, NAN, None).course is Course.STOP


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"health": {"not_finite": "rewind"}}, "writes none"),
        ({"health": {"spike": "rewind"}}, "writes none"),
        ({"health": {"spike": "skip"}, "plan": {"schedule": "pipedream", "pp": 2}}, "has made it before"),
        ({"health": {"repeat_every": 3}, "plan": {"schedule": "pipedream", "pp": 2}}, "while the pipeline is full"),
        ({"health": {"repeat_every": 3}, "plan": {"compress": "int8"}}, "add what it lost"),
    ],
)
def test_what_a_job_cannot_do_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_job(fields)
    make_job({"health": {"not_finite": "rewind"}, "checkpoint": {"every_steps": 5}})


@settings(max_examples=200)
@given(bad=st.sets(st.integers(0, 60)), most=st.integers(1, 5), every=st.integers(1, 7))
def test_rewinds_come_to_an_end(bad: set[int], most: int, every: int) -> None:
    """Over any steps that are bad whatever the data, with a checkpoint every so many: no bad step is undone twice, and
    no more than `most` in a row are left out or undone."""
    asked, step, saved, courses = judge(not_finite="rewind", most_skips=most), 0, [(0, judge().state_dict())], []
    while step < 60:
        decision = asked(step, NAN if step in bad else 2.0, 1.0)
        if decision.course is Course.STOP:
            break
        courses.append((step, decision.course))
        if decision.course is Course.REWIND:
            step, state = saved[-1]
            asked.load_state_dict(json.loads(json.dumps(state)))
            asked.rewound(courses[-1][0])
            continue
        step += 1
        if step % every == 0 and decision.course is Course.GO_ON:
            saved.append((step, asked.state_dict()))
    undone = [at for at, course in courses if course is Course.REWIND]
    assert len(undone) == len(set(undone)) and set(undone) <= bad
    row, furthest = 0, -1
    for at, course in courses:
        if course is not Course.GO_ON:
            row, furthest = row + 1, max(furthest, at)
        elif at >= furthest:
            row = 0
        assert row <= most


def test_a_run_that_diverges_stops_under_rewind() -> None:
    """From some step on every loss is no number, and each rewind goes to the last checkpoint before it."""
    asked = judge(not_finite="rewind", most_skips=4)
    for step in range(5):
        assert asked(step, 2.0, 1.0).course is Course.GO_ON
    state, courses, step = asked.state_dict(), [], 5
    while True:
        decision = asked(step, NAN, NAN)
        courses.append(decision.course)
        if decision.course is Course.STOP:
            break
        if decision.course is Course.REWIND:
            asked.load_state_dict(state)
            asked.rewound(step)
        else:
            step += 1
    assert courses == [Course.REWIND, Course.SKIP, Course.REWIND, Course.SKIP, Course.STOP]
    assert "4 times in a row before it a step was left out or undone, and health.most_skips is 4" in decision.sentence
    assert "going back" not in decision.sentence


def test_a_step_without_a_target_is_no_loss() -> None:
    """It is counted, and neither in the band nor in a row."""
    asked = judge(spike="skip")
    for step in range(20):
        asked.had_no_target()
        assert asked(step, 2.0, 1.0).course is Course.GO_ON
    assert asked.counts.skipped == asked.counts.without_target == 20
    assert "20 steps left out for no token of them has a loss" in asked.counts.sentences()
