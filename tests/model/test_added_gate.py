"""A gate that one file describes, outside of the package, works with everything."""

import json
import math
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.gate_facts import GATES
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.moe import MoeSpec
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import compare
from shardwright.model.gates.choice import Known, make_gate
from support.added_gate import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with GATES.also(FACTS):
        yield


def with_it(job: JobSpec) -> JobSpec:
    moe = job.model.moe.model_copy(update={"gate": NAME, "softmax_over": "all"})
    return job.model_copy(update={"model": job.model.model_copy(update={"moe": moe})})


def test_it_chooses_and_weighs_as_a_plain_loop() -> None:
    spec, logits_TE = MoeSpec(experts=6, top_k=3, gate=NAME), torch.randn(40, 6)
    gate = make_gate(spec)
    scores_TE = gate.score(logits_TE)
    choice = gate.choose(scores_TE, Known(torch.zeros(6), torch.zeros(6, 6), None))
    weights_TK = gate.weigh(logits_TE, scores_TE, choice.experts_TK)
    for logits, experts, weights in zip(
        logits_TE.tolist(), choice.experts_TK.tolist(), weights_TK.tolist(), strict=True
    ):
        wanted = sorted(range(6), key=lambda e: -logits[e])[1:4]
        assert experts == wanted
        parts = [math.exp(logits[e]) for e in wanted]
        assert weights == pytest.approx([part / sum(parts) for part in parts], rel=1e-5)


@pytest.mark.parametrize("plan", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True}])
def test_it_trains_what_one_rank_trains(plan: dict[str, int | bool]) -> None:
    job = with_it(small_job("mixtral", **plan))
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(job, record, 2)), job)


def test_its_account_is_as_near_to_its_dry_run_as_one_of_the_package() -> None:
    """Its account is beside that of gshard, which keeps the same: choices, and weights with their sum."""
    base = small_job("mixtral", dp=2, ep=2)
    ratios = []
    for gate in (NAME, "gshard"):
        moe = base.model.moe.model_copy(update={"gate": gate, "softmax_over": "all"})
        run = dry_run(base.model_copy(update={"model": base.model.model_copy(update={"moe": moe})}), 0, "cpu")
        assert run.collectives == run.account_collectives
        ratios.append(run.account.total_bytes / run.peak.total_bytes)
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)


def test_fields_that_it_does_not_read_are_faults() -> None:
    spec = MoeSpec(experts=4, gate=NAME, bias_update=0.1, partners=2)
    assert [fault.split(" is ")[0] for fault in spec.faults(2)] == ["model.moe.bias_update", "model.moe.partners"]
    assert all(f'model.moe.gate = "{NAME}" knows nothing of it' in fault for fault in spec.faults(2))


def test_commands_know_it() -> None:
    job = make_job({"model": {"moe": {"experts": 4, "gate": NAME}}, "batch": {"global_batch_size": 8}})
    assert job.model.moe.num_chosen == 2 and NAME in GATES
    arguments = [
        "estimate",
        "quickstart-moe",
        "--set",
        f"model.moe.gate={NAME}",
        "--set",
        "model.moe.softmax_over=all",
        "--set",
        "cluster.device=h100-sxm",
    ]
    run = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0 and json.loads(run.stdout)["step_s"] > 0
    shown = CliRunner().invoke(cli, ["fields"], catch_exceptions=False).output
    assert f"One of softmax, {NAME}, switch" in " ".join(shown.split())
