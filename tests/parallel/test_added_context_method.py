"""A method of context parallelism that one file describes, outside of the package, works with everything."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import compare
from support.added_context_method import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with CONTEXT_METHODS.also(FACTS):
        yield


def test_it_trains_what_one_rank_trains() -> None:
    job = small_job(cp=2, tp=2, cp_method=NAME)
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(job, record, 2)), job)


def test_its_account_is_that_of_one_with_the_same_facts() -> None:
    runs = [dry_run(small_job(cp=2, dp=2, cp_method=name), 0, "cpu") for name in (NAME, "all-gather")]
    assert runs[0].account == runs[1].account and runs[0].peak.total_bytes == runs[1].peak.total_bytes
    assert runs[0].collectives == runs[0].account_collectives == runs[1].account_collectives


def test_commands_know_it() -> None:
    on_device = ["--set", "cluster.device=h100-sxm"]
    plan = ["--set", "plan.cp=2", "--set", "plan.dp=1", "--set", f"plan.cp_method={NAME}"]
    run = CliRunner().invoke(cli, ["estimate", "quickstart", *plan, *on_device, "--json"], catch_exceptions=False)
    assert run.exit_code == 0 and json.loads(run.stdout)["step_s"] > 0
    keeps = ["--keep", f"plan.cp_method={NAME}", "--keep", "plan.cp=2"]
    plans = CliRunner().invoke(
        cli, ["plan", "quickstart", "--devices", "4", "--device", "h100-sxm", *keeps, "--json"], catch_exceptions=False
    )
    assert {plan["plan"]["cp_method"] for plan in json.loads(plans.stdout)} == {NAME}
