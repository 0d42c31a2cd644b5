"""Curves beside metrics.jsonl: Prometheus' text, and Weights & Biases without its package."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.train.run_curves import BoardCurves, PrometheusFile, curve_faults, exposition, run_curves


def job_with(*overrides: str) -> JobSpec:
    return load_job("quickstart", overrides)


def test_values_are_gauges_with_the_job_as_a_label() -> None:
    text = exposition({"step": 3, "loss/2 tokens further": 1.5}, 'a "b"')
    assert text == (
        '# TYPE shardwright_step gauge\nshardwright_step{run="a \\"b\\""} 3\n'
        "# TYPE shardwright_loss_2_tokens_further gauge\n"
        'shardwright_loss_2_tokens_further{run="a \\"b\\""} 1.5\n'
    )


def test_a_truth_is_a_number_in_the_text() -> None:
    """node_exporter refuses a file with a word where a number should be, and all its other values."""
    lines = exposition({"skipped": True, "loss": float("nan")}, "job").splitlines()[1::2]
    assert [float(line.split()[-1]) for line in lines] == pytest.approx([1.0, float("nan")], nan_ok=True)


def test_the_file_has_the_newest_values_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    curves = PrometheusFile(file, "job")
    for step in (1, 2, 3):
        curves.draw(step, {"loss": 4.0 - step})
    curves.draw(3, {"validation_loss": 2.0})
    curves.close()
    lines = file.read_text(encoding="utf-8").splitlines()[1::2]
    assert lines == [
        'shardwright_step{run="job"} 3',
        'shardwright_loss{run="job"} 1.0',
        'shardwright_validation_loss{run="job"} 2.0',
    ]


def test_a_job_has_the_curves_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: logged.append((name, step_metric)),
        log=logged.append,
        finish=lambda: logged.append("finished"),
    )
    asked: dict[str, Any] = {}
    module = SimpleNamespace(init=lambda **options: asked.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("shardwright.train.run_curves._is_installed", lambda package: True)
    job = job_with("run.wandb=offline", f"run.prometheus={tmp_path}/run.prom")
    assert curve_faults(job) == []
    board, prometheus, wandb = run_curves(job, tmp_path, 0)
    assert isinstance(board, BoardCurves) and isinstance(prometheus, PrometheusFile)
    wandb.draw(2, {"loss": 1.0})
    wandb.go_back(1)
    wandb.close()
    board.close()
    assert logged == [("*", "step"), {"step": 2, "loss": 1.0}, "finished"]
    assert asked["mode"] == "offline" and asked["dir"] == str(tmp_path) and asked["config"]["name"] == "quickstart"


def test_what_can_not_be_written_is_a_fault_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.train.run_curves._is_installed", lambda package: False)
    faults = curve_faults(job_with("run.wandb=online", "run.prometheus=no/such/run.prom"))
    assert len(faults) == 2 and "pip install 'shardwright[wandb]'" in faults[0] and "no folder no/such" in faults[1]
    assert curve_faults(job_with()) == []
