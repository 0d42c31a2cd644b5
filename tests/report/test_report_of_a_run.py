"""The report that a run leaves, and leaves again when it has resumed, stopped by a failure, or can't be written."""

import json
import shutil
from pathlib import Path

import pytest

from shardwright.api.reported_run import ReportedRun
from shardwright.api.training import StartOptions, train_job
from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.run_file_names import CARD, METRICS, REPORT
from shardwright.report.run.run_card import RunCard
from shardwright.report.run.run_record import read_record
from shardwright.report.run.run_report import report_data
from support.packed_columns import unpacked_ranks


def job_in(folder: Path) -> JobSpec:
    """A pipeline of two ranks, with a checkpoint every second step."""
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40, encoding="utf-8")
    fields = {
        "model.layers": 2, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 2, "model.vocab": 256,
        "model.sequence": 16, "plan.dp": 1, "plan.tp": 1, "plan.pp": 2, "plan.microbatch_size": 1,
        "batch.global_batch_size": 4, "optimizer.steps": 4, "checkpoint.every_steps": 2,
        "data.path": str(text), "run.folder": str(folder / "run"), "run.device": "cpu",
    }  # fmt: skip
    return load_job("quickstart", tuple(f"{field}={value}" for field, value in fields.items()))


@pytest.mark.processes
def test_a_run_reports_its_performed_step_and_its_resume(tmp_path: Path) -> None:
    job, folder, printed = job_in(tmp_path), tmp_path / "run", list[str]()
    start = StartOptions(tell=printed.append, warn=printed.append)
    result = train_job(job, start)
    assert f"report in {folder / REPORT}" in result.comparison_text and "performed" not in result.to_dict()
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    train_job(job, start)
    card, record = RunCard.read(folder), read_record(folder)
    assert card.status == "done" and card.steps == 4 and card.compared is not None
    assert [(again["first"], again["last"], again["bit_exact"]) for again in card.done_again] == [(3, 4, True)]
    data = report_data(card, record, folder)
    planned, performed = (part["data"]["sections"][0] for part in (data["parts"]["timeline"], data["performed"]))
    num_planned, num_performed = (
        [len(rank["busy"]["from"]) for rank in unpacked_ranks(each)] for each in (planned, performed)
    )
    assert num_performed == [1 + num for num in num_planned]
    assert performed["makespan"] == pytest.approx(planned["makespan"])
    assert not [line for line in printed if "note" in line]


def test_a_failure_is_in_the_report(tmp_path: Path) -> None:
    reported, folder = ReportedRun(job_in(tmp_path), pytest.fail), tmp_path / "run"
    folder.mkdir()
    reported.begin(folder)
    (folder / METRICS).write_text("", encoding="utf-8")
    with pytest.raises(RunError), reported.telling_of_failure():
        raise RunError("the loss is nan")
    assert (card := RunCard.read(folder)).status == "failed" and card.failure == "the loss is nan" and card.ended
    assert (folder / REPORT).is_file()


def test_a_run_that_failed_before_its_first_line_has_a_card_alone(tmp_path: Path) -> None:
    reported = ReportedRun(job_in(tmp_path), pytest.fail)
    reported.begin(tmp_path)
    assert reported.end("failed", "rank 1 was killed") is None and not (tmp_path / REPORT).exists()
    assert RunCard.read(tmp_path).failure == "rank 1 was killed"


def test_what_goes_wrong_with_a_report_is_a_note(tmp_path: Path) -> None:
    printed = list[str]()
    reported = ReportedRun(job_in(tmp_path), printed.append)
    assert reported.end("done") is None and printed == []  # the run never began
    reported.begin(tmp_path / "missing")
    folder = tmp_path / "run"
    folder.mkdir()
    reported.begin(folder)
    (folder / REPORT).mkdir()
    (folder / METRICS).write_text("[]\n", encoding="utf-8")
    assert reported.end("done") is None
    assert len(printed) == 2 and "no card" in printed[0] and "no report" in printed[1]
    assert json.loads((folder / CARD).read_text(encoding="utf-8"))["status"] == "done"
