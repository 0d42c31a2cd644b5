"""A recipe of fp8 that one file describes, outside of the package, works with everything."""

import json
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.precision import PrecisionSpec
from shardwright.measure.dryrun import dry_run
from shardwright.measure.verdict import Record
from support.added_float8 import FACTS, NAME, on_mesh_with_it
from support.cases import record, small_job
from support.ranks import run_ranks


@pytest.fixture(autouse=True)
def _is_there() -> Iterator[None]:
    with FLOAT8_RECIPES.also(FACTS):
        yield


def job_in(float8: str, **plan: int) -> JobSpec:
    precision = PrecisionSpec(compute="bf16", float8=float8, float8_weight_gradients=float8 != "none")
    return small_job(layers=4, **plan).model_copy(update={"precision": precision})


def trained(job: JobSpec) -> list[Record]:
    return run_ranks(job.plan.world, on_mesh_with_it, job, record, job, 2)


def output(*arguments: str) -> str:
    run = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    return run.output


def test_it_is_there_where_it_was_added() -> None:
    assert FLOAT8_RECIPES.names == ("delayed", "tensorwise", "rowwise", NAME, "blockwise")
    FLOAT8_RECIPES.remove(NAME)
    with pytest.raises(PlanError, match="it should be 'none', 'delayed', 'tensorwise', 'rowwise' or 'blockwise'"):
        load_job("quickstart", [f"precision.float8={NAME}"])
    FLOAT8_RECIPES.add(FACTS)


def test_it_trains_what_one_rank_trains() -> None:
    (one,), exact = trained(job_in(NAME)), trained(job_in("none"))[0]
    whole = {place.name: box for place, box in one.boxes}
    for rank in trained(job_in(NAME, pp=2)):
        assert rank.steps == one.steps
        assert all(torch.equal(box, whole[place.name][place.slices]) for place, box in rank.boxes)
    for step, other in zip(exact.steps, one.steps, strict=True):
        assert other.loss == pytest.approx(step.loss, rel=2e-2) and other.loss != step.loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}])
def test_its_account_is_what_a_rank_holds_and_moves(plan: dict[str, int]) -> None:
    ratios, runs = {}, {name: dry_run(job_in(name, **plan), 0, "cpu") for name in (NAME, "rowwise", "none")}
    for name, run in runs.items():
        assert run.collectives == run.account_collectives
        ratios[name] = run.account.total_bytes / run.peak.total_bytes
    # Rows of this small model are shorter than a tile.
    assert ratios[NAME] == pytest.approx(ratios["rowwise"], rel=0.01)
    assert (
        runs[NAME].account.buffers_bytes == runs["rowwise"].account.buffers_bytes > runs["none"].account.buffers_bytes
    )


def test_a_weight_has_two_casts_with_scales_of_tiles() -> None:
    assert FACTS.num_weight_casts == 2
    assert FACTS.weight_scales(256, 384) == 256 * 3 + 384 * 2
    blocks, rows, tensors = (FLOAT8_RECIPES[name] for name in ("blockwise", "rowwise", "tensorwise"))
    assert [facts.weight_scales(256, 384) for facts in (blocks, rows, tensors)] == [6, 640, 1]


def test_commands_know_it() -> None:
    arguments = ["quickstart", "--set", "precision.compute=bf16", "--set", "cluster.device=h100-sxm"]
    recipe = ["--set", f"precision.float8={NAME}"]
    assert json.loads(output("estimate", *arguments, *recipe, "--json"))["step_s"] > 0
    assert f"fp8 ({NAME})" in output("explain", *arguments, *recipe)
    text = " ".join(output("fields").split())
    assert "One of none, delayed, tensorwise, rowwise, tilewise, blockwise" in text
    asked = ["plan", "llama3-8b", "--devices", "8", "--device", "h100-sxm", "--json", "--float8", NAME]
    few = [word for kept in ("cp=1", "pp=1", "recompute=full") for word in ("--keep", f"plan.{kept}")]
    asked = [*asked[:-3], *few, *asked[-3:]]
    assert any(plan["float8"] == NAME for plan in json.loads(output(*asked).splitlines()[-1]))
    run = CliRunner().invoke(cli, [*asked[:-1], "columnwise"])
    assert run.exit_code != 0 and NAME in str(run.exception)


def test_other_systems_lack_it() -> None:
    for system in ("megatron", "torchtitan", "deepspeed"):
        run = CliRunner().invoke(cli, ["export", "llama3-405b-8k", "--set", f"precision.float8={NAME}", "--to", system])
        assert run.exit_code != 0 and isinstance(run.exception, PlanError)
        assert "float8" in str(run.exception)
