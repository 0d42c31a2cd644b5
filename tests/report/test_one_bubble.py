"""All that tell the bubble of a job's step tell one number."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from shardwright.cli.main import cli
from shardwright.config.job import JobSpec
from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.explain.story import tell
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.study import number
from shardwright.schedule.job_program import relative_costs
from shardwright.simulate.full_step import simulated_bubble, simulated_step
from support.predicted_jobs import predicted_jobs

_ROUNDED = 1e-11  # JSON has times without rounding errors of subtraction, to twelve decimals


@settings(max_examples=30, deadline=None)
@given(predicted_jobs())
def test_bubble_of_the_drawing_is_that_of_the_prediction(job: JobSpec) -> None:
    study, story = study_job(job, 0.0, 1), tell(job)
    if story.step is None:  # the device has no peak for the number type
        assert not study.is_seconds
        return
    step = simulated_step(job, shipped())
    assert study.values["bubble"] == pytest.approx(step.bubble, abs=_ROUNDED)
    assert study.values["bubble_fraction"] == pytest.approx(step.bubble / step.total, abs=_ROUNDED)
    assert story.step.bubble == step.bubble and study.values["step_s"] == step.total
    # Idle is more: of the rank that idles most it has what messages and collectives add.
    most = max(sum(row.values()) for row in study.values["idle"])
    assert most >= study.values["mean_idle"] * (1 - 1e-9)
    assert study.values["bubble"] <= (1 + 1e-6) * most + _ROUNDED or job.plan.schedule.startswith("zb-")


@settings(max_examples=20, deadline=None)
@given(predicted_jobs())
def test_bubble_in_units_leaves_messages_out(job: JobSpec) -> None:
    free, late = (simulated_bubble(job, relative_costs(job, latency)) for latency in (0.0, 1.0))
    assert free == late == study_job(job, 1.0, 1).simulated.bubble.value  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llama3-405b-16k", "bloom-176b-384", "yi-34b"])
def test_commands_say_one_bubble(name: str) -> None:
    estimated, drawn, answer = (
        json.loads(CliRunner().invoke(cli, [command, name, "--json"]).stdout)
        for command in ("estimate", "simulate", "explain")
    )
    bubble, whole = estimated["time"]["bubble"], estimated["step_s"]
    assert drawn["bubble"] == pytest.approx(bubble, abs=_ROUNDED) and answer["step"]["bubble"] == bubble
    assert drawn["bubble_fraction"] == pytest.approx(bubble / whole, abs=_ROUNDED)
    text = CliRunner().invoke(cli, ["simulate", name]).stdout
    share = f"{100 * bubble / whole:.1f} %"
    assert f"{seconds_text(bubble)} ({share})" in text and "\nidle " in text
    explained = " ".join(CliRunner().invoke(cli, ["explain", name]).stdout.split())
    assert f"{share} of it (the bubble)" in explained


def test_page_has_the_same_figures(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert CliRunner().invoke(cli, ["simulate", "quickstart", "--html", str(page)]).exit_code == 0
    result = json.loads(CliRunner().invoke(cli, ["simulate", "quickstart", "--json"]).stdout)
    written = page.read_text()
    assert f"{number(result['bubble'])} ({100 * result['bubble_fraction']:.1f} %)" in written
    assert f"{number(result['mean_idle'])} ({100 * result['idle_fraction']:.1f} %)" in written
