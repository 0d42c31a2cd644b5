"""The report of a run: what is read of its metrics, its card, and its page, without a browser."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.api.reported_run import ReportedRun
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.run_file_names import CARD, METRICS, REPORT
from shardwright.report.page_document import modules_of, page_document, templates_said
from shardwright.report.run.run_card import RunCard
from shardwright.report.run.run_record import RunRecord, read_record, record_of, thinned
from shardwright.report.run.run_report import report_data, report_html
from shardwright.report.timeline.job_study import study_job
from support.languages import assert_same_in_chinese
from support.recorded_run import step_row, write_run


def data_of(page: str) -> dict[str, Any]:
    """The data that a page has in it."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def test_a_record_has_the_kinds_of_lines_that_a_run_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=5, broken_line=True)
    record = read_record(folder)
    assert (record.first_step, record.last_step) == (1, 5)
    assert [step for step, _ in record.curves["held_out"]] == [5]
    assert record.curves["held_out:law"] == [(5, 2.5)]
    assert record.skipped == [(3, "spike")] and record.num_spikes == 1
    assert record.checkpoints == [{"step": 5, "blocking_s": 0.1, "durable_s": 0.2}]
    assert record.data == {"text": "0123"} and record.device == "this CPU"
    assert record.done_again[0]["bit_exact"]
    assert record.median("tokens_per_s") == 1000.0 and record.median("mfu") is None


def test_a_report_has_the_same_numbers_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, overrides=("cluster.device=h100-sxm",))
    card, record = RunCard.read(folder), read_record(folder)

    def texts_in(language: str) -> str:
        page = report_html(card, record, folder, language)
        assert f'<html lang="{language}">' in page
        headings = re.findall("<h2>(.*?) <small>", page)
        return "\n".join([*headings, *texts_of(data_of(page)["parts"])])

    assert_same_in_chinese(texts_in, monkeypatch, 300)
    printed = json.loads(re.search(r'id="phrases">(.*?)</script>', report_html(card, record, folder, "zh"))[1])
    assert printed["steps done"] == "已完成步数" and len(printed) > 100
    assert 'id="phrases">{}<' in report_html(card, record, folder)


def texts_of(data: Any) -> list[str]:
    """The texts in the data of a page."""
    if isinstance(data, str):
        return [data]
    values = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [text for value in values for text in texts_of(value)]


def test_a_script_says_templates_that_go_on() -> None:
    assert templates_said('say("a {b}", { b }) + say("c \\"d\\" "\n  + "e") + essay("f")') == ["a {b}", 'c "d" e']


def test_medians_leave_the_first_steps_out() -> None:
    record = record_of([step_row(step) | {"step_s": 60.0 if step < 3 else 1.0} for step in range(1, 9)])
    assert record.median("step_s") == 1.0


@pytest.mark.parametrize("size", [10, 1200, 5000])
def test_a_thinned_curve_keeps_its_spike_and_its_end(size: int) -> None:
    points = [(step, 9.0 if step == size // 2 else 1.0 + 1.0 / step) for step in range(1, size + 1)]
    kept = thinned(points)
    assert len(kept) <= 1201 and (size // 2, 9.0) in kept and kept[-1] == points[-1]
    assert kept == sorted(kept)


def test_a_card_says_what_was_run_and_is_read_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    card = RunCard.read(folder).with_record(read_record(folder))
    assert card.checked_job() == load_job("quickstart", ("optimizer.steps=5",))
    assert card.status == "running" and card.steps == 5 and card.held_out_loss == 2.25
    assert card.ended_as("failed", "rank 1 left").failure == "rank 1 left"
    assert len(card.job_sha256) == 64 and card.versions["torch"] and card.data == {"text": "0123"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "surprise": 2}', "[" * 100_000])
def test_a_card_that_is_none_is_a_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD).write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match="no card"):
        RunCard.read(tmp_path)


def test_planned_and_performed_are_drawn_in_seconds(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    card = RunCard.read(folder)
    planned = study_job(card.checked_job(), 0.0, 1).simulated.times
    rows = [
        [[2.0 * start, 2.0 * end] for start, end in zip(*row, strict=True)]
        for row in zip(planned.start, planned.end, strict=True)
    ]
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"performed": {"rows": rows}}) + "\n")
    data = report_data(card, read_record(folder), folder)
    assert data["performed"]["unit"] == data["parts"]["timeline"]["unit"] == "s"
    drawn = [part["data"]["sections"][0]["makespan"] for part in (data["parts"]["timeline"], data["performed"])]
    assert drawn == pytest.approx([2.0 * planned.makespan] * 2)
    record = record_of([{"performed": {"rows": rows[:1]}}])
    assert report_data(card, record, folder)["performed"] is None  # of another program


def test_a_page_loads_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    card = RunCard.read(folder).ended_as("failed", "</script><script>alert(1)")
    page = report_html(card, read_record(folder), folder)
    assert data_of(page)["card"]["failure"] == card.failure
    assert "<script>alert" not in page
    assert not re.findall(r"https?://", page)
    modules = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page)[1])["imports"]
    assert set(modules) == set(modules_of("run_report.js"))
    assert all(address.startswith("data:text/javascript;base64,") for address in modules.values())


def test_a_title_is_no_markup() -> None:
    assert "<title>&lt;b&gt;</title>" in page_document("<b>", "", {}, "units.js")


def test_the_command_writes_the_page_and_prints_the_card(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    done = CliRunner().invoke(cli, ["report", str(folder), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["steps"] == 5
    assert data_of((folder / REPORT).read_text(encoding="utf-8"))["figures"]["steps"] == 5
    own = tmp_path / "mine.html"
    assert CliRunner().invoke(cli, ["report", str(folder), "--html", str(own)]).output == f"report in {own}\n"
    (folder / METRICS).unlink()
    refused = CliRunner().invoke(cli, ["report", str(folder)])
    assert isinstance(refused.exception, PlanError) and METRICS in str(refused.exception)


def test_a_job_that_this_version_has_not_leaves_the_measurements(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    fields = json.loads((folder / CARD).read_text(encoding="utf-8"))
    fields["job"]["plan"]["schedule"] = "of-tomorrow"
    (folder / CARD).write_text(json.dumps(fields), encoding="utf-8")
    data = report_data(RunCard.read(folder), read_record(folder), folder)
    assert data["parts"] == {} and "of-tomorrow" in data["notes"][0] and data["series"]["loss"]


def test_a_run_that_its_ranks_refuse_leaves_the_card_of_the_earlier_run(tmp_path: Path) -> None:
    """Such as one with another model than the checkpoints in its folder."""
    job = load_job("quickstart", [])
    ReportedRun(job, print).begin(tmp_path)
    text = (tmp_path / CARD).read_text(encoding="utf-8")
    refused = ReportedRun(load_job("quickstart", ["model.layers=2"]), print)
    refused.begin(tmp_path)
    assert (tmp_path / CARD).read_text(encoding="utf-8") != text
    with pytest.raises(PlanError), refused.telling_of_failure():
        raise PlanError("checkpoint", ["its model.layers is 4, and the job's 2"])
    assert (tmp_path / CARD).read_text(encoding="utf-8") == text


def test_tokens_a_second_fit_the_step_beside_them() -> None:
    """The mean of the two middle rates is not the rate of the mean of the two middle steps."""
    seconds = [9.0, 9.0, 1.0, 3.0]
    steps = list(enumerate(seconds, start=1))
    record = RunRecord(curves={"step_s": steps, "tokens_per_s": [(step, 4096 / step_s) for step, step_s in steps]})
    assert record.median("step_s") == 2.0
    assert record.rate("tokens_per_s") == pytest.approx(4096 / 2.0)
    assert record.rate("mfu") is None
