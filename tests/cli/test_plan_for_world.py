"""Which plan runs where torchrun has started another number of ranks than the plan's."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.api.plan_for_world import for_world
from shardwright.cli.checked_job import load_to_run
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.report.toml_files import write_toml

pytestmark = pytest.mark.usefixtures("searched_once")

QUICK = ("plan.dp=2", "plan.tp=2", "plan.pp=2")


def job(*overrides: str) -> JobSpec:
    return load_to_run("quickstart", (*QUICK, *overrides))


def test_its_own_plan() -> None:
    spec = job()
    assert for_world(spec, 8) == (spec, "")


def test_the_first_fallback_that_has_so_many_ranks() -> None:
    spec = job("plan.fallback=[{tp=2}, {dp=2, pp=2, zero=1, schedule='gpipe'}, {}]")
    result, printed = for_world(spec, 4)
    assert (result.plan.dp, result.plan.pp, result.plan.zero, result.plan.schedule) == (2, 2, 1, "gpipe")
    assert result.model_copy(update={"plan": spec.plan}) == spec
    assert printed.startswith("4 ranks were started, and the plan is for 8: this is plan.fallback[1], ")
    assert for_world(spec, 1)[1].startswith("1 rank was started, and the plan is for 8: this is plan.fallback[2], ")


@pytest.mark.long
def test_what_the_planner_recommends() -> None:
    cluster = ('cluster.device="h100-sxm"', "cluster.devices_per_node=4", "cluster.nodes=2")
    spec = job(*cluster, "plan.fallback=[{tp=2}]", "batch.global_batch_size=8")  # of few microbatches, soon searched
    result, printed = for_world(spec, 4)
    assert (result.plan.world, result.cluster.num_devices, result.batch) == (4, 4, spec.batch)
    assert printed.startswith("4 ranks were started, and the plan is for 8: this is what `plan` recommends, ")


@settings(max_examples=20, deadline=None)
@given(world=st.integers(1, 24).filter(lambda world: world not in (2, 8)))
def test_a_fallback_to_paste_is_one_that_runs(world: int) -> None:
    spec = job("plan.fallback=[{tp=2}]")
    with pytest.raises(PlanError) as refusal:
        for_world(spec, world)
    (fault,) = refusal.value.faults
    assert fault.startswith(
        f"{world} rank{'s were' if world > 1 else ' was'} started, and the plan needs dp 2 x tp 2 x pp 2 = 8, "
        f"plan.fallback 2; start 8, or change the plan"
    )
    _, result, line = fault.partition(", or write in [plan]: fallback = ")
    assert result or world not in (1, 4, 16)
    if result:
        plan, printed = for_world(job(f"plan.fallback={line}"), world)
        assert plan.plan.world == world
        assert "this is plan.fallback[1]" in printed


def test_every_fault_names_its_fallback() -> None:
    with pytest.raises(PlanError) as refusal:
        job("plan.fallback=[{tp=3}, {dp=8}, {pp=3, schedule='dualpipe'}, {dp=2}, {tp=2}]")
    faults = refusal.value.faults
    assert any(fault.startswith("plan.fallback[0]: plan.tp 3 does not divide") for fault in faults)
    assert "plan.fallback[1]: dp 8 x tp 1 x pp 1 = 8 ranks, for which the plan itself is taken" in "\n".join(faults)
    assert "plan.fallback[4]: dp 1 x tp 2 x pp 1 = 2 ranks, for which plan.fallback[3] is taken" in "\n".join(faults)
    with pytest.raises(PlanError, match=r"plan\.fallback\[0\]: .*dualpipe"):
        job("plan.fallback=[{pp=3, schedule='dualpipe'}]")
    with pytest.raises(PlanError, match=r"plan\.fallback\.0\.tpp is not a known field; did you mean tp"):
        job("plan.fallback=[{tpp=3}]")
    with pytest.raises(PlanError, match=r"plan\.fallback\.0\.fallback is not a known field"):
        job("plan.fallback=[{fallback=[]}]")


def test_it_can_be_written_down_and_read(tmp_path: Path) -> None:
    spec = job("plan.fallback=[{tp=2, zero=0}, {dp=2, pp=2}]")
    write_toml(tmp_path / "job.toml", spec)
    assert load_job(str(tmp_path / "job.toml")).plan == spec.plan
