"""The causes of a profiled step's time: of made-up traces of a GPU and of a CPU, and of files that are no traces."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.run_file_names import PROFILE
from shardwright.report.run.profiled_time import cause_rows, profiled_step, read_profiles

STEP = {"ph": "X", "cat": "user_annotation", "name": "step 4", "tid": 1, "ts": 100.0, "dur": 1000.0}


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur}


def kernel(name: str, ts: float, dur: float, stream: int = 7) -> dict[str, Any]:
    return event(name, ts, dur, "kernel", stream)


ON_GPU = [
    STEP,
    event("aten::mm", 100, 900),  # of the host: no time of the device
    kernel("sm90_xmma_gemm_bf16", 150, 300),
    kernel("ncclDevKernel_AllReduce_Sum", 400, 200, stream=9),  # the first 50 beside the product
    kernel("flash_fwd_kernel", 600, 100),
    kernel("elementwise_kernel", 700, 50),
    kernel("multi_tensor_apply_kernel", 900, 100),
    kernel("sm90_xmma_gemm_bf16", 1050, 500),  # ends after the step
]
ON_CPU = [
    STEP,
    event("_ColumnProduct", 150, 400),
    event("aten::mm", 200, 100),
    event("c10d::send", 350, 150),
    event("Optimizer.step#Adam.step", 800, 200, "user_annotation"),
    event("aten::mul", 850, 100),
    event("aten::mm", 300, 400, tid=2),  # of another thread
]


def test_a_moment_of_a_gpu_is_that_of_the_kernel_that_runs() -> None:
    step = profiled_step(0, 4, ON_GPU)
    assert step.seconds == pytest.approx(1e-3)
    assert {cause: round(1e6 * seconds) for cause, seconds in step.by_cause.items() if seconds} == {
        "no kernel runs": 50 + 150 + 50,
        "products": 300 + 50,
        "communication": 150,
        "attention": 100,
        "other operators": 50,
        "optimizer": 100,
    }


def test_a_moment_of_a_cpu_is_that_of_the_innermost_operator() -> None:
    step = profiled_step(0, 4, ON_CPU)
    times = {cause: round(1e6 * seconds) for cause, seconds in step.by_cause.items() if seconds}
    assert times == {"products": 100, "optimizer": 200, "all else: other operators, waits, host": 700}


def test_steps_that_run_as_one_are_told_of_one() -> None:
    step = profiled_step(0, 4, [STEP | {"name": "steps 4 to 7"}, *ON_CPU[1:]])
    assert step.seconds == pytest.approx(250e-6) and sum(step.by_cause.values()) == pytest.approx(step.seconds)


def test_causes_stand_beside_the_predicted_ones() -> None:
    parts = "compute again tensor context expert data messages bubble optimizer host other"
    predicted = dict.fromkeys(parts.split(), 0.0001)
    rows = {row["cause"]: row for row in cause_rows([profiled_step(0, 4, ON_GPU)] * 2, predicted)}
    assert rows["computing"]["seconds"] == pytest.approx(500e-6) and not rows["computing"]["is_part"]
    assert rows["communication"]["predicted_s"] == pytest.approx(6e-4) and rows["products"]["predicted_s"] is None
    assert sum(row["predicted_s"] or 0.0 for row in rows.values()) == pytest.approx(sum(predicted.values()))
    whole = sum(row["seconds"] for row in rows.values() if not row["is_part"])
    assert whole == pytest.approx(1e-3)


def test_only_traces_of_the_last_profiled_step_are_read(tmp_path: Path) -> None:
    folder = tmp_path / PROFILE
    folder.mkdir()
    trace = gzip.compress(json.dumps({"traceEvents": ON_CPU}).encode())
    for name in ("rank00000-step00003", "rank00000-step00004", "rank00001-step00004"):
        (folder / f"{name}.json.gz").write_bytes(trace)
    (folder / "rank00002-step00004.json.gz").write_bytes(trace[:60])
    (folder / "rank00003-step00004.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    (folder / "rank00004-step00004.json.gz").write_bytes(gzip.compress(b'{"traceEvents": ["x"]}'))
    (folder / "rank00005-step00004.json.gz").symlink_to(folder / "rank00000-step00004.json.gz")
    steps, notes = read_profiles(tmp_path)
    assert [(step.rank, step.step) for step in steps] == [(0, 4), (1, 4)]
    assert [note.split()[2] for note in notes] == [f"rank0000{rank}-step00004.json.gz" for rank in (2, 3, 4)]
    assert read_profiles(tmp_path / "nothing") == ([], [])


@pytest.mark.parametrize(
    "step",
    [
        STEP | {"name": "steps 5 to 4"},
        STEP | {"name": "steps 9 to 4"},
        STEP | {"dur": float("inf")},
        STEP | {"dur": float("nan")},
        STEP | {"ts": float("-inf")},
        STEP | {"dur": 10**400},
        STEP | {"dur": "long"},
        STEP | {"name": None},
        STEP,  # in a folder, and not in a file
    ],
)
def test_a_trace_with_no_step_that_has_a_time_is_a_note(step: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / PROFILE / "rank0-step4.json.gz"
    file.parent.mkdir()
    if step is STEP:
        file.mkdir()
    else:
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": [step, *ON_CPU[1:]]}).encode()))
    steps, notes = read_profiles(tmp_path)
    assert not steps and len(notes) == 1 and file.name in notes[0]


def test_a_pipe_in_place_of_a_trace_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / PROFILE).mkdir()
    os.mkfifo(tmp_path / PROFILE / "rank0-step4.json.gz")
    steps, (note,) = read_profiles(tmp_path)
    assert not steps and "rank0-step4.json.gz" in note
