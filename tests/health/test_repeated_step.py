"""A step that is computed twice changes nothing of a run, and names the rank whose gradients differ."""

from typing import Any

import pytest

from health.watched import Watched, same, spoil_gradients, watched_run, with_health
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from support.cases import small_job
from support.ranks import run_on_mesh

STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp tied": {"kind": "gpt-tied", "dp": 2},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3, "recompute": "full"},
    "tied over pp": {"kind": "llama-tied", "pp": 2, "dp": 2, "zero": 1},
    "zero 3 in a pipeline": {"pp": 2, "dp": 2, "zero": 3},
    "zero bubble": {"pp": 2, "schedule": "zb-h1"},
    "dualpipe": {"pp": 2, "schedule": "dualpipe", "batch": 8},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "experts": {"kind": "correlation", "dp": 2, "ep": 2},
    "biased experts": {"kind": "deepseek", "dp": 2, "ep": 2},
    "offload": {"dp": 2, "zero": 2, "offload_optimizer": 0.5},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"compute": "fp16", "loss_scale": 2.0**20},
    "delayed fp8": {"compute": "bf16", "float8": "delayed", "float8_history": 2},
}


def with_and_without(mesh: Mesh, job: JobSpec, plain: JobSpec) -> tuple[Watched, Watched]:
    return watched_run(mesh, job, STEPS), watched_run(mesh, plain, STEPS)


def check_neutral(plain: JobSpec) -> None:
    """The run with repeats is the run without, to the last bit, and nothing differed."""
    job = with_health(plain, repeat_every=1)
    for repeated, other in run_on_mesh(job, with_and_without, job, plain):
        assert repeated.steps == other.steps
        assert [step.routing for step in repeated.steps] == [step.routing for step in other.steps]
        assert same(repeated.state, other.state)
        assert f"{STEPS} steps computed twice, none differed" in repeated.conclusion


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_it_changes_nothing(name: str) -> None:
    check_neutral(small_job(**PLANS[name]))


@pytest.mark.processes
@pytest.mark.parametrize("name", PRECISIONS)
def test_nor_in_other_numbers(name: str) -> None:
    job = small_job(dp=2)
    check_neutral(job.model_copy(update={"precision": job.precision.model_copy(update=PRECISIONS[name])}))


def test_nor_with_dropout() -> None:
    job = small_job()
    check_neutral(job.model_copy(update={"model": job.model.model_copy(update={"dropout": 0.2})}))


def once(mesh: Mesh, replica: Replica, step: int) -> None:
    """One element of a rank's gradient is wrong once."""
    if mesh.rank == 1 and step == 1:
        spoil_gradients(replica, 1, value=0.125)


@pytest.mark.processes
@pytest.mark.parametrize("plan", [{"dp": 3, "batch": 6}, {"dp": 2, "zero": 2}, {"dp": 2, "pp": 2, "zero": 1}])
def test_the_rank_that_differs_is_named(plan: dict[str, Any]) -> None:
    job = with_health(small_job(**plan), repeat_every=2)
    for run in run_on_mesh(job, watched_run, job, STEPS, once):
        (line,) = run.lines
        assert line.startswith("step 2 was computed twice")
        assert "gradients differ on 1 rank (rank 1 (" in line
        assert "first in " in line
        assert "2 steps computed twice, 1 differed" in run.conclusion
