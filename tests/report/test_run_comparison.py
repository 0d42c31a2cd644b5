"""Lines of `train` at its end: predicted beside measured, and what can't be predicted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.phrase import as_data, in_language
from shardwright.memory.job_memory import job_memory
from shardwright.report.run.run_record import record_of
from shardwright.report.run_comparison import compared_dict, compared_text
from shardwright.train.steps_measured import SpanBytes, SpanUse, StepsMeasured, StepsRecorder
from support.languages import num_chinese


def job(device: str = "unknown", **plan: Any) -> JobSpec:
    return make_job(
        {
            "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 64},
            "cluster": {"device": device},
            "plan": plan,
            "batch": {"global_batch_size": 8},
        }
    )


def seen(of: JobSpec, **blocked_s: float) -> StepsMeasured:
    recorder = StepsRecorder(memory=job_memory(of)[0])
    for step_s in (9.0, 9.0, 1.0, 2.0, 3.0):  # the first two warm up
        recorder.add(SpanUse(step_s, dict(blocked_s), SpanBytes(3, 1, {"tp": 100, "world": 8})), 2**20)
    result = recorder.measured()
    assert result is not None
    return result


def test_time_is_by_cause_and_adds_up() -> None:
    of = job("h100-sxm", tp=2, pp=2)
    result = compared_dict(of, seen(of, tp=0.25, pp=0.5, world=0.125))
    predicted_s, measured_s = result["whole_step_s"]
    assert measured_s == 2.0 and result["num_steps"] == 3 and result["time_not_predicted"] == ""
    causes = result["time"]
    assert causes["tensor parallel"][1] == 0.25 and causes["pipeline"][1] == 0.5 and causes["replicas"][1] == 0.125
    assert sum(both[1] for both in causes.values()) == pytest.approx(measured_s)
    assert sum(both[0] for both in causes.values()) == pytest.approx(predicted_s)
    assert "context parallel" not in causes


def test_times_are_predicted_for_the_device_that_was_recognised() -> None:
    of, named = job(tp=2), job("h200-sxm", tp=2)
    measured = replace(seen(of, tp=0.25), device="h200-sxm")
    result = compared_dict(of, measured)
    assert result["time"] == compared_dict(named, measured)["time"] and result["predicted_for"] == "h200-sxm"
    assert "predicted for h200-sxm" in compared_text(result)
    elsewhere = compared_dict(job("h100-sxm", tp=2), measured)  # the job says where it is meant to run
    assert elsewhere["predicted_for"] is None and elsewhere["time"] != result["time"]


def test_memory_and_bytes_are_there_where_time_is_not() -> None:
    of = job(tp=2)
    result = compared_dict(of, seen(of, tp=0.25))
    assert result["whole_step_s"] == [None, 2.0] and "shardwright calibrate" in result["time_not_predicted"]
    assert result["memory_bytes"]["parameters"] == [job_memory(of)[0].parameters_bytes] * 2
    predicted, measured = result["axis_bytes"]["tp"]
    assert predicted > measured == 100
    text = compared_text(result)
    assert "time is not predicted" in text and "equal" in text and "waiting: tensor parallel" in text
    lines = text.splitlines()[1:-1]
    assert len({len(line.rstrip()) for line in lines if line.endswith("equal")}) == 1


def test_a_device_that_is_not_known_is_told(tmp_path: Path) -> None:
    file = tmp_path / "chip.toml"
    file.write_text("memory_gib = 1.0\n", encoding="utf-8")
    of = job(str(file))
    reason = compared_dict(of, seen(of))["time_not_predicted"]
    assert "peak" in reason


def test_a_reason_that_was_written_is_read_in_any_language(tmp_path: Path) -> None:
    file = tmp_path / "chip.toml"
    file.write_text("memory_gib = 1.0\n", encoding="utf-8")
    for of in (job("unknown"), job(str(file))):
        compared = compared_dict(of, seen(of))
        reason = compared["time_not_predicted"]
        row = json.loads(json.dumps({"predicted_and_measured": compared, "time_not_predicted": as_data(reason)}))
        read = record_of([row]).compared
        assert read == compared and num_chinese(in_language(read["time_not_predicted"], "zh")) > 10
        for damaged in ({}, {"time_not_predicted": {"template": [], "values": {}}}, {"time_not_predicted": {"a": 1}}):
            assert record_of([{"predicted_and_measured": compared} | damaged]).compared == compared


def test_no_steps_are_nothing() -> None:
    assert StepsRecorder().measured() is None


def test_a_short_run_says_what_it_saw() -> None:
    recorder = StepsRecorder()
    recorder.add(SpanUse(4.0, {}, None), 0)
    result = recorder.measured()
    assert result is not None and (result.num_steps, result.step_s) == (1, 4.0)
