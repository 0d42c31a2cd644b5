"""A schedule that one file describes, outside of the package, works with everything."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import compare
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.shape_program import shape_program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import simulated_step
from support.added_schedule import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with SCHEDULES.also(FACTS):
        yield


def on_pipeline(fields: dict[str, Any]) -> JobSpec:
    return make_job({"model": {"layers": 4}, "batch": {"global_batch_size": 8}} | fields)


def output(*arguments: str) -> str:
    run = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    return run.stdout


def test_it_is_there_where_it_was_added() -> None:
    places = [SCHEDULES.names.index(name) for name in ("gpipe", NAME, "1f1b")]
    assert NAME in searched() and places == sorted(places)
    with pytest.raises(ValueError, match="there is a schedule 'gpipe-last-first' already"), SCHEDULES.also(FACTS):
        pass
    SCHEDULES.remove(NAME)
    with pytest.raises(PlanError, match=f"plan.schedule = \"{NAME}\": it should be 'sequential', 'gpipe', '1f1b'"):
        on_pipeline({"plan": {"pp": 2, "schedule": NAME}})
    SCHEDULES.add(FACTS)
    assert on_pipeline({"plan": {"pp": 2, "schedule": NAME}}).plan.schedule == NAME


def test_it_trains_what_one_rank_trains() -> None:
    job = small_job(pp=4, schedule=NAME, microbatch_size=2, batch=10)
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(job, record, 2)), job)


@pytest.mark.parametrize("plan", [{"pp": 4}, {"pp": 2, "dp": 2, "zero": 3}, {"pp": 3, "recompute": "full"}])
def test_its_account_is_as_near_to_its_dry_run_as_one_of_the_package(plan: dict[str, object]) -> None:
    ratios = {}
    for name in (NAME, "gpipe"):
        job = small_job(schedule=name, batch=12, **plan)
        for rank in range(job.plan.pp):
            run = dry_run(job, rank * job.plan.world // job.plan.pp, "cpu")
            assert run.collectives == run.account_collectives
            ratios[name, rank] = run.account.total_bytes / run.peak.total_bytes
    for rank in range(job.plan.pp):
        assert ratios[NAME, rank] == pytest.approx(ratios["gpipe", rank], rel=0.02)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (4, 2)])
def test_its_closed_forms_are_what_is_played(p: int, m: int) -> None:
    facts = SCHEDULES[NAME]
    program = shape_program(NAME, PipelineShape(p, m))
    assert facts.idle_s is not None
    costs = Costs.uniform(p, 1.0, 1.5, 0.5)
    assert play(program, costs).makespan == m * 3.0 + facts.idle_s(p, m, 1, 1.0, 1.5, 0.5)
    job = small_job(pp=p, schedule=NAME, batch=m)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "h100-sxm"})})
    assert simulated_step(job, shipped()).total == pytest.approx(step_time(run_of(job), shipped()).total, rel=0.05)


def test_commands_know_it(tmp_path: Path) -> None:
    sets = ["--set", f"plan.schedule={NAME}", "--set", "plan.dp=1"]
    shown = output("schedule", NAME, "--stages", "3", "--microbatches", "4")
    assert "(p - 1)(F + B)" in shown.replace(" * ", "")
    assert NAME in output("schedule", "--compare", "--stages", "2", "--microbatches", "4")
    answer = json.loads(output("estimate", "quickstart", *sets, "--set", "cluster.device=h100-sxm", "--json"))
    assert answer["fits"] and answer["step_s"] > 0
    page = tmp_path / "timeline.html"
    output("simulate", "quickstart", *sets, "--html", str(page))
    assert NAME in page.read_text(encoding="utf-8")
    assert NAME in output("explain", "quickstart", *sets, "--set", "cluster.device=h100-sxm")
    keeps = ["--keep", f"plan.schedule={NAME}", "--keep", "plan.pp=2"]
    plans = output("plan", "quickstart", "--devices", "8", "--device", "h100-sxm", *keeps, "--json")
    assert {plan["plan"]["schedule"] for plan in json.loads(plans)} == {NAME}


def test_other_systems_lack_it() -> None:
    for system in ("megatron", "torchtitan"):
        run = CliRunner().invoke(cli, ["export", "llama3-405b-8k", "--set", f"plan.schedule={NAME}", "--to", system])
        assert run.exit_code != 0 and isinstance(run.exception, PlanError | SystemExit)
        assert NAME in f"{run.output} {run.exception}"


def test_an_order_that_forgets_a_backward_is_refused_by_its_command() -> None:
    def forgetful(shape: PipelineShape) -> Schedule:
        schedule: Schedule = FACTS.make(shape)
        rows = tuple(row[:-1] for row in schedule.ranks)
        return replace(schedule, name="forgetful", ranks=rows)

    with SCHEDULES.also(replace(FACTS, name="forgetful", make=forgetful)):
        run = CliRunner().invoke(cli, ["schedule", "forgetful"])
    assert isinstance(run.exception, PlanError) and run.exit_code != 0
    assert any("B 0, I 0, W 0 times" in fault for fault in run.exception.faults)


def test_an_order_that_stops_for_ever_is_one_fault_everywhere() -> None:
    def stuck(shape: PipelineShape) -> Schedule:
        schedule: Schedule = FACTS.make(shape)
        rows = tuple(tuple(reversed(row)) for row in schedule.ranks)
        return replace(schedule, name="stuck", ranks=rows)

    with SCHEDULES.also(replace(FACTS, name="stuck", make=stuck)):
        for command in (["schedule", "stuck"], ["estimate", "quickstart", "--set", "plan.schedule=stuck"]):
            run = CliRunner().invoke(cli, command)
            assert isinstance(run.exception, PlanError) and "stops for ever" in str(run.exception)
