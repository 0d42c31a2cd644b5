"""An optimizer that one file describes, outside of the package, works with everything."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import compare
from shardwright.parallel.optimizers.elementwise import make_optimizer
from support.added_optimizer import FACTS, NAME, on_mesh_with_it
from support.cases import by_one_rank, record, small_job
from support.ranks import run_ranks
from support.rounding import check_rounding


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with OPTIMIZERS.also(FACTS):
        yield


def with_it(job: JobSpec, name: str = NAME) -> JobSpec:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"name": name})})


def test_its_steps_are_those_of_a_plain_loop() -> None:
    spec = OptimizerSpec(name=NAME, learning_rate=0.1, weight_decay=0.2, momentum=0.5)
    weight, plain, moment = torch.randn(7), [], [0.0] * 7
    plain = weight.tolist()
    optimizer = make_optimizer(spec, [weight], [])
    for _ in range(3):
        weight.grad = torch.randn(7)
        optimizer.step()
        moment = [0.5 * m + 0.5 * g for m, g in zip(moment, weight.grad.tolist(), strict=True)]
        plain = [w * (1 - 0.1 * 0.2) - 0.1 * ((m > 0) - (m < 0)) for w, m in zip(plain, moment, strict=True)]
    assert weight.tolist() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1, "offload_optimizer": 0.5}])
def test_it_trains_what_one_rank_trains(plan: dict[str, float]) -> None:
    job = small_job(**plan)
    # Small steps: where a momentum is rounding alone its sign is another one on each plan.
    job = with_it(job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"learning_rate": 1e-6})}))
    ranks = run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)
    check_rounding(compare(ranks, by_one_rank(job, record, 2)), job)


def test_its_account_is_that_of_one_with_as_many_moments() -> None:
    for plan in ({"dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3}):
        runs = [dry_run(with_it(small_job(**plan), name), 0, "cpu") for name in (NAME, "lion")]
        assert runs[0].account == runs[1].account
        assert runs[0].peak.optimizer_bytes == runs[1].peak.optimizer_bytes > 0


def test_decays_that_bf16_can_not_follow_are_faults() -> None:
    fields = {"optimizer": {"name": NAME, "momentum": 0.9999}, "precision": {"compute": "bf16", "moments": "bf16"}}
    with pytest.raises(PlanError, match=r"optimizer\.momentum 0\.9999 takes 0\.0001 of a moment off"):
        make_job(fields | {"batch": {"global_batch_size": 8}})


def test_commands_know_it() -> None:
    arguments = ["quickstart", "--set", f"optimizer.name={NAME}", "--set", "cluster.device=h100-sxm"]
    run = CliRunner().invoke(cli, ["estimate", *arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0 and json.loads(run.stdout)["step_s"] > 0
    shown = CliRunner().invoke(cli, ["explain", *arguments], catch_exceptions=False).output
    assert "Then Signum updates a rank's part of the weights" in " ".join(shown.split())
    assert "One of adamw, adam, sgd, lion, signum" in " ".join(
        CliRunner().invoke(cli, ["fields"], catch_exceptions=False).output.split()
    )
    with pytest.raises(ValueError, match="there is an optimizer 'signum' already"):
        OPTIMIZERS.add(replace(FACTS, place=1))
