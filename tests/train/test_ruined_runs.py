"""Runs that diverge: how they end, what they keep, and what the next run goes on from. On one rank in this process, at
a learning rate of 1e6, under which a model of some layers is ruined after three updates."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardwright.cli.kept_checkpoints import chosen_step
from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.kept import is_said_healthy, manifest_of, steps_kept
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.metrics import MetricsLog
from shardwright.train.run_lines import RunResult
from shardwright.train.trainer import train
from support.cases import small_job
from support.ranks import run_on_mesh

RUINS = {"learning_rate": 1e6, "warmup_steps": 0, "steps": 12}


def job_on_text(folder: Path, sections: dict[str, dict[str, Any]], **plan: Any) -> JobSpec:
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = small_job(batch=2, **plan).model_dump(mode="json", exclude_unset=True)
    given: dict[str, Any] = {
        "model": {"vocab": 256},
        "data": {"path": str(text)},
        "optimizer": RUINS,
        "run": {"eval_batches": 1, "log_every": 2, "sample_tokens": 0},
        "checkpoint": {"every_steps": 1, "keep_last": 2},
        "health": {"slow_share": 0},
    }
    for section, values in [*given.items(), *sections.items()]:
        fields[section] = fields.get(section, {}) | values
    return make_job(fields)


@contextmanager
def heard() -> Iterator[list[str]]:
    """The lines that runs say meanwhile."""
    lines = list[str]()
    with patch.object(MetricsLog, "tell", lambda log, text: lines.append(text)):
        yield lines


def run(job: JobSpec, folder: Path) -> tuple[RunResult | None, str]:
    """The result of a run, or the sentence that it ends with."""

    def on_mesh(mesh: Mesh) -> RunResult:
        return train(job, mesh, folder)

    try:
        return run_on_mesh(job, on_mesh)[0], ""
    except RunError as error:
        return None, str(error)


def healthy(folder: Path) -> list[int]:
    storage = open_storage(str(folder / "checkpoints"))
    return [step for step in steps_kept(storage) if is_said_healthy(storage, step)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
@pytest.mark.parametrize("most_skips", [3, 20])
def test_a_run_that_diverges(policy: str, most_skips: int, tmp_path: Path) -> None:
    """It ends with a sentence that names the step and a checkpoint that is there. One that goes on from it, at a rate
    that is none too high, has losses that are numbers to its end."""
    job = job_on_text(tmp_path, {"health": {"not_finite": policy, "most_skips": most_skips, "slow_share": 0}})
    with heard() as lines:
        result, end = run(job, tmp_path / "run")
    assert result is None and "the loss is nan in step " in end
    kept = healthy(tmp_path / "run")
    assert f"{tmp_path}/run/checkpoints/step-{kept[0]:08d}, and the same command goes on from it" in end
    assert sum("going on after step" in line for line in lines) <= most_skips
    mended = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"learning_rate": 1e-3})})
    with heard() as lines:
        result, end = run(mended, tmp_path / "run")
    assert result is not None and not end, "the checkpoint that it names is worth going on from"
    assert result.steps == 12 and result.last_loss is not None and math.isfinite(result.last_loss)
    assert any(f"going on after step {kept[0]} " in line for line in lines)
    assert any("is not healthy: " in line and "the last healthy one, is taken" in line for line in lines)
    assert any(
        line.startswith(f"note: the learning rate of step {kept[0] + 1} is 0.000") and "would be 9" in line
        for line in lines
    )


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_weights_whose_gradients_are_no_numbers_are_passed_over(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One update too large leaves weights that give the loss of chance, a number, and no gradient: the run takes the
    checkpoint before that by itself."""

    def until(steps: int, rate: float) -> tuple[RunResult | None, str]:
        optimizer = {"learning_rate": rate, "warmup_steps": 0, "steps": steps, "schedule": "constant"}
        model = {"vocab": 256, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 88, "sequence": 64}
        health = {"not_finite": policy, "most_skips": 3}
        job = job_on_text(tmp_path, {"optimizer": optimizer, "model": model, "health": health})
        return run(job, tmp_path / "run")

    assert until(4, 2e-3)[0] is not None
    assert until(4, 2e-3)[0] is not None
    until(5, 3e6)
    assert "gradient" in until(8, 3e6)[1]
    assert max(healthy(tmp_path / "run")) == 4
    storage = open_storage(str(tmp_path / "run" / "checkpoints"))
    steps = steps_kept(storage)
    capsys.readouterr()
    assert chosen_step("run", storage, steps, None) == 4  # as for `generate` and `checkpoint export`
    newest = f"step-{max(steps):08}"
    assert (
        f"{newest} is not healthy: " in (answer := capsys.readouterr().err)
        and "the last healthy one, is taken" in answer
    )
    chosen_step("run", storage, steps, max(steps))
    assert f"note: {newest} is not healthy: " in capsys.readouterr().err
    result, _ = until(8, 2e-3)
    assert result is not None and result.steps == 8 and math.isfinite(result.last_loss or math.nan)


def test_a_run_that_is_done_and_has_no_loss(tmp_path: Path) -> None:
    """Fewer steps are left than may be left out."""
    sections = {"health": {"not_finite": "skip", "slow_share": 0}, "optimizer": RUINS | {"steps": 7}}
    _, end = run(job_on_text(tmp_path, sections), tmp_path / "run")
    assert end.startswith("the run is done, and the loss is nan in step 7; the last healthy checkpoint is ")
    storage = open_storage(str(tmp_path / "run" / "checkpoints"))
    assert manifest_of(storage, 7).health.sentence == "the loss is nan in step 7"
    # The next one goes on from the healthy one, ruins itself again, and does not say that all is done.
    _, again = run(job_on_text(tmp_path, sections), tmp_path / "run")
    assert again.startswith("the run is done, and the loss is nan in step 7; ")


def test_without_checkpoints_it_says_that_there_are_none(tmp_path: Path) -> None:
    sections = {"checkpoint": {"every_steps": 0}}
    with heard() as lines:
        _, end = run(job_on_text(tmp_path, sections), tmp_path / "run")
    assert end.endswith("; no checkpoints were kept (checkpoint.every_steps keeps some)")
    assert sum("no checkpoints are kept" in line for line in lines) == 1
    fine = job_on_text(tmp_path, sections | {"optimizer": {"steps": 2}})
    with heard() as lines:
        result, _ = run(fine, tmp_path / "run")
    assert result is not None
    assert [line for line in lines if "no checkpoints were kept" in line] == [lines[-2]]


def test_gradients_that_overflow_for_ever(tmp_path: Path) -> None:
    """Under a loss scale that can't fall: no update is made, and the checkpoints of these steps are not healthy."""
    scale = {"compute": "fp16", "loss_scale": 2.0**48, "loss_scale_growth_steps": 0}
    _, end = run(job_on_text(tmp_path, {"precision": scale}), tmp_path / "run")
    assert end.startswith("the run is done, and gradients of step 12 overflow at the least loss scale; ")
    assert end.endswith("no checkpoint is healthy: begin anew with --fresh")


def test_warm_up_waits_for_the_loss_scale(tmp_path: Path) -> None:
    """The first updates have the first rates of the warm-up, however many steps overflow before them, and a run that is
    stopped between them and goes on has the same."""
    sections: dict[str, dict[str, Any]] = {
        "precision": {"compute": "fp16", "loss_scale": 2.0**30},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4, "steps": 30, "schedule": "constant"},
        "checkpoint": {"every_steps": 1, "keep_last": 40},
    }

    def rates(folder: Path) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["learning_rate"]) for line in lines if "loss" in line and not line["skipped"]]

    job = job_on_text(tmp_path, sections)
    result, end = run(job, tmp_path / "run")
    assert result is not None, end
    whole = rates(tmp_path / "run")
    assert 2 < whole[0][0] < 26, "some steps overflowed"
    assert [rate for _, rate in whole[:5]] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    for last in (whole[0][0] - 1, whole[1][0]):
        for later in range(last + 1, 31):
            for file in (tmp_path / "run" / "checkpoints" / f"step-{later:08d}").glob("*"):
                file.unlink()
        run(job, tmp_path / "run")
        assert rates(tmp_path / "run") == whole
