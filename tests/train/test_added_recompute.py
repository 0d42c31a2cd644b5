"""A policy of recomputation that one file describes, outside of the package, works with everything."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from fuzz.ledgers import account_of, differences, dry_ledger
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.recompute_facts import RECOMPUTES, searched_recomputes
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.layers.query import named_operators
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import compare
from support.added_recompute import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with RECOMPUTES.also(FACTS):
        yield


def output(*arguments: str) -> str:
    run = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    return run.stdout


def test_it_is_there_where_it_was_added() -> None:
    assert [facts.name for facts in searched_recomputes()] == ["none", "selective", NAME, "full", "stage"]
    RECOMPUTES.remove(NAME)
    with pytest.raises(PlanError, match="it should be 'none', 'stage', 'full', 'selective', 'budget' or 'layers'"):
        load_job("quickstart", [f"plan.recompute={NAME}"])
    RECOMPUTES.add(FACTS)
    assert load_job("quickstart", [f"plan.recompute={NAME}"]).plan.recompute == NAME


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2, "pp": 2, "zero": 3}])
def test_it_trains_what_one_rank_trains(plan: dict[str, int]) -> None:
    job = small_job(recompute=NAME, **plan)
    alone = job.model_copy(update={"plan": job.plan.model_copy(update={"recompute": "none"})})
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(alone, record, 2)), job)


@pytest.mark.parametrize("plan", [{"tp": 2, "sequence_parallel": True}, {"dp": 2, "pp": 2, "zero": 3}])
def test_its_account_is_what_a_rank_holds_and_moves(plan: dict[str, int]) -> None:
    job = small_job(recompute=NAME, batch=8, **plan)
    listed = {"recompute": "layers", "recompute_layers": [sorted(p) for p in FACTS.layers(job.plan, job.model.layers)]}
    same = job.model_copy(update={"plan": job.plan.model_copy(update=listed)})
    for rank in range(0, job.plan.world, job.plan.stage_ranks):
        moved, program = dry_ledger(job, rank, "cpu")
        assert differences(moved, account_of(job, program, rank)) == []
        runs = [dry_run(one, rank, "cpu") for one in (job, same)]
        assert runs[0].account == runs[1].account and runs[0].peak == runs[1].peak


def test_its_fields_are_checked() -> None:
    for field, reader in (("recompute_every=2", '"full" or "selective"'), ("memory_limit_gib=1", '"budget"')):
        with pytest.raises(PlanError, match=f"'{NAME}'; use plan.recompute = {reader}"):
            load_job("quickstart", [f"plan.recompute={NAME}", f"plan.{field}"])


def test_commands_know_it() -> None:
    arguments = ["quickstart", "--set", f"plan.recompute={NAME}", "--set", "cluster.device=h100-sxm"]
    estimate = json.loads(output("estimate", *arguments, "--json"))
    assert estimate["step_s"] > json.loads(output("estimate", "quickstart", *arguments[3:], "--json"))["step_s"]
    answer = " ".join(output("explain", *arguments).split())
    assert f"recompute {NAME}" in answer
    assert "computes all again" in answer and "computes attention again" in answer
    text = " ".join(output("fields").split())
    assert "the first half of the layers, and the attention of the others; selective: the operators of rec" in text


def test_a_search_proposes_it() -> None:
    asked = ["plan", "quickstart", "--devices", "8", "--device", "h100-sxm", "--json"]
    plans = json.loads(output(*asked, "--keep", f"plan.recompute={NAME}", "--keep", "plan.cp=1"))
    assert {plan["plan"]["recompute"] for plan in plans} == {NAME}


def test_other_software_lacks_it() -> None:
    for system in ("megatron", "torchtitan", "deepspeed", "accelerate"):
        arguments = ["export", "llama3-405b-8k", "--set", f"plan.recompute={NAME}", "--to", system]
        run = CliRunner().invoke(cli, arguments)
        assert run.exit_code != 0 and isinstance(run.exception, PlanError)
        assert "recompute" in str(run.exception)
    job = load_job("quickstart", [f"plan.recompute={NAME}"])
    assert f"recomputation {NAME}" in missing_features(software_of("megatron-core"), job)


def test_a_name_of_no_operator_is_refused() -> None:
    assert named_operators("attention+norm") == {"attention", "norm"} and named_operators("none") == set()
    with pytest.raises(ValueError, match="'atention\\+norm': atention is no operator"):
        named_operators("atention+norm")
