"""The screen of a run that goes on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.run_file_names import CARD, METRICS
from shardwright.report.rendered import rendered
from shardwright.report.run.run_record import RunRecord, read_record, record_of
from shardwright.report.run.run_screen import run_screen, sparkline
from support.recorded_run import step_row, write_run


def screen_of(record: RunRecord, num_steps: int | None = 10, silent_s: float = 0.0) -> str:
    return rendered(run_screen("run", record, num_steps, silent_s))


def test_the_screen_has_what_one_looks_for(tmp_path: Path) -> None:
    screen = screen_of(read_record(write_run(tmp_path)))
    assert screen.startswith("run: step 5 of 10, 2.5 s left")
    for words in ("loss", "2.5000", "held-out loss", "2.2500", "1,000", "computing 70 %", "1.0 GiB", "step 5 "):
        assert words in screen
    assert "1 step changed no weight, the last one 3: spike" in screen and "MFU" not in screen


@pytest.mark.parametrize(("silent_s", "is_told"), [(29.0, False), (31.0, True)])
def test_a_silent_run_is_told(silent_s: float, is_told: bool) -> None:
    assert ("nothing was recorded" in screen_of(record_of([step_row(1)]), silent_s=silent_s)) == is_told


def test_a_run_that_ended_early_has_no_time_left() -> None:
    record = record_of([step_row(1)])
    for end in ("preempted", "failed: rank 3 was lost"):
        heading = rendered(run_screen("run", record, 10, end=end)).splitlines()[0]
        assert heading == f"run: step 1 of 10, {end}"
    assert rendered(run_screen("run", record, 1, end="failed")).startswith("run: step 1 of 1, done")


def test_the_command_says_how_a_run_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path, overrides=["optimizer.steps=10"])
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    (folder / CARD).write_text(json.dumps(card | {"status": "preempted"}), encoding="utf-8")
    assert "step 5 of 10, preempted" in CliRunner().invoke(cli, ["top", str(folder), "--once"]).output


def test_a_terminal_that_can_only_print_gets_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("TERM", "dumb")
    folder = write_run(tmp_path)
    clock = SimpleNamespace(sleep=lambda seconds: pytest.fail("it goes on"))
    monkeypatch.setattr("shardwright.cli.run_reports.time", clock)
    assert CliRunner().invoke(cli, ["top", str(folder)]).output.count("last checkpoint") == 1


def test_a_run_without_a_step_says_so() -> None:
    assert screen_of(record_of([{"begun": {"after_step": 0}}])) == "run: no step is recorded yet"


def test_a_sparkline_goes_from_the_least_to_the_most() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10).plain == "█▅▁"
    assert sparkline([1.0, 1.0], 10).plain == "▁▁"
    assert len(sparkline(list(map(float, range(1000))), 60).plain) <= 60


@pytest.mark.parametrize("has_card", [True, False])
def test_once_prints_one_screen(tmp_path: Path, has_card: bool) -> None:
    folder = write_run(tmp_path)
    if not has_card:
        (folder / CARD).unlink()
    done = CliRunner().invoke(cli, ["top", str(folder), "--once"])
    assert done.exit_code == 0 and ("step 5 of 5, done" in done.output) == has_card
    answer = json.loads(CliRunner().invoke(cli, ["top", str(folder), "--json"]).stdout)
    assert answer["step"] == 5 and answer["tokens_per_s"] == 1000.0 and answer["mfu"] is None
    (folder / METRICS).unlink()
    assert isinstance(CliRunner().invoke(cli, ["top", str(folder), "--once"]).exception, PlanError)
