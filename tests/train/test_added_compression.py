"""A compression that one file describes and computes, outside of the package, works with everything."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from fuzz.ledgers import account_of, differences, dry_ledger
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.load import load_job
from shardwright.measure.verdict import compare
from support.added_compression import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with COMPRESSIONS.also(FACTS):
        yield


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "pp": 2, "zero": 1}])
def test_it_trains_what_one_rank_trains(plan: dict[str, int]) -> None:
    job = small_job(compress=NAME, compress_least=1, **plan)
    alone = job.model_copy(update={"plan": job.plan.model_copy(update={"compress": "none"})})
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(alone, record, 2)), job)


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 4, "zero": 2}, {"dp": 2, "pp": 2, "zero": 3}])
def test_its_account_is_what_a_rank_moves(plan: dict[str, int]) -> None:
    job = small_job(compress=NAME, compress_least=1, batch=8, **plan)
    for rank in range(job.plan.pp):
        moved, program = dry_ledger(job, rank * job.plan.dp, "cpu")
        assert differences(moved, account_of(job, program, rank)) == []
        assert any("all_to_all" in name for name in moved)


def test_commands_know_it() -> None:
    arguments = ["quickstart", "--set", f"plan.compress={NAME}", "--set", "cluster.device=h100-sxm"]
    run = CliRunner().invoke(cli, ["estimate", *arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0 and json.loads(run.stdout)["step_s"] > 0
    shown = CliRunner().invoke(cli, ["explain", *arguments], catch_exceptions=False).output
    assert f"Gradients are compressed on their way: {NAME}" in " ".join(shown.split())
    with pytest.raises(PlanError, match=r"'float64' has no rank; leave it out, or use plan\.compress = .powersgd"):
        load_job("quickstart", [f"plan.compress={NAME}", "plan.compress_rank=8"])


def test_without_it_the_name_is_a_fault() -> None:
    COMPRESSIONS.remove(NAME)
    try:
        with pytest.raises(PlanError, match="'none', 'bf16', 'fp16', 'int8', 'powersgd' or 'topk'"):
            load_job("quickstart", [f"plan.compress={NAME}"])
    finally:
        COMPRESSIONS.add(FACTS)
