"""A number that is not finite in one rank's gradient, on every axis, under every policy."""

import math
from typing import Any

import pytest

from health.watched import Watched, heal, same, spoil_gradients, watched_run, with_health
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from support.cases import small_job
from support.ranks import run_on_mesh

pytestmark = pytest.mark.processes

BAD_STEP, BAD_RANK, STEPS = 2, 1, 4
AXES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "dp zero 1": {"dp": 2, "zero": 1},
    "dp zero 2": {"dp": 2, "zero": 2},
    "dp zero 3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
    "ep": {"kind": "mixtral", "dp": 2, "ep": 2},
}


def always(mesh: Mesh, replica: Replica, step: int) -> None:
    """The fault comes whenever the step is computed."""
    heal(replica)
    if mesh.rank == BAD_RANK and step == BAD_STEP:
        spoil_gradients(replica, 10**6)


def once(mesh: Mesh, replica: Replica, step: int) -> None:
    """The fault comes once."""
    if mesh.rank == BAD_RANK and step == BAD_STEP:
        spoil_gradients(replica, 1)


def watched(mesh: Mesh, job: JobSpec, num_steps: int, fault: Any) -> tuple[Watched, Watched]:
    """A run with the fault, and one without that ends where the fault begins."""
    return watched_run(mesh, job, num_steps, fault), watched_run(mesh, job, BAD_STEP)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_each_policy_on_each_axis(axis: str, policy: str) -> None:
    job = with_health(small_job(**AXES[axis]), not_finite=policy)
    for run, before in run_on_mesh(job, watched, job, STEPS, always):
        assert run.courses[BAD_STEP] == policy
        assert run.courses[:BAD_STEP] == ["go on"] * BAD_STEP
        bad = run.steps[BAD_STEP]
        assert (bad.skipped, bad.grad_norm, math.isfinite(bad.loss)) == (True, None, True)
        answer = run.end or " ".join(run.lines)
        assert f"in step {BAD_STEP + 1} (gradient norm nan)" in answer
        assert "computed again, the first gradient that is not finite is that of " in answer
        assert f" on rank {BAD_RANK} (" in answer
        if policy == "skip":
            assert len(run.steps) == STEPS
            assert run.steps[-1].grad_norm is not None
            assert math.isfinite(run.steps[-1].grad_norm)
            assert run.skipped == 1
            assert "1 step not finite (1 left out)" in run.conclusion
        else:
            assert len(run.steps) == BAD_STEP + 1
            assert same(run.state, before.state)  # neither weights nor moments have moved


def test_a_fault_of_the_machine_is_told_from_one_of_the_numbers() -> None:
    job = with_health(small_job(dp=2), not_finite="skip")
    for run, _ in run_on_mesh(job, watched, job, STEPS, once):
        assert "computed again, the step was finite on every rank" in " ".join(run.lines)


def nan_in_the_weights(mesh: Mesh, replica: Replica, step: int) -> None:
    """The forward of one replica is not finite."""
    if mesh.rank == BAD_RANK and step == BAD_STEP:
        shards = replica.shards[max(replica.shards)]
        shards.units[-1].value_shard[-1] = math.nan


def test_a_loss_names_its_replica() -> None:
    job = small_job(dp=2)
    for run, _ in run_on_mesh(job, watched, job, STEPS, nan_in_the_weights):
        assert run.courses[-1] == "stop"
        assert "the loss is nan in step 3" in run.end
        assert (
            "the loss of rank 1 (pp 0, dp 1, tp 0) is not finite, so it began in a forward of that replica" in run.end
        )
        assert "lower optimizer.learning_rate (0.003)" in run.end


def test_too_many_skips_end_the_run() -> None:
    job = with_health(small_job(dp=2, zero=1), not_finite="skip", most_skips=2)

    for run in run_on_mesh(job, watched_run, job, 9, from_bad_step_on):
        assert run.courses == ["go on", "go on", "skip", "skip", "stop"]
        assert "health.most_skips is 2" in run.end


def from_bad_step_on(mesh: Mesh, replica: Replica, step: int) -> None:
    """The fault stays."""
    heal(replica)
    if mesh.rank == BAD_RANK and step >= BAD_STEP:
        spoil_gradients(replica, 10**6)


def test_an_overflow_of_fp16_is_not_the_policys() -> None:
    job = small_job(dp=2)
    fields = {"compute": "fp16", "loss_scale": 2.0**30}
    job = job.model_copy(update={"precision": job.precision.model_copy(update=fields)})
    for run in run_on_mesh(job, watched_run, job, 3, None):
        assert run.courses[0] == "skip"
        assert (run.steps[0].skipped, run.steps[0].decision.cause) == (True, "overflow")
        assert run.lines == []
        assert f"{run.skipped} steps left out for gradients that overflowed" in run.conclusion


def test_a_spike_is_left_out() -> None:
    """The loss of a made-up run jumps when its weights are blown up."""
    job = with_health(small_job(dp=2), spike="skip", spike_window=8)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"steps": 20})})
    for run in run_on_mesh(job, watched_run, job, 11, blow_up):
        assert run.courses == ["go on"] * 10 + ["skip"]
        assert "a spike" in run.lines[-1]
        assert "1 spike of the loss (1 left out)" in run.conclusion


def blow_up(mesh: Mesh, replica: Replica, step: int) -> None:
    """Weights that are far too large."""
    if step == 10:
        for shards in replica.shards.values():
            for unit in shards.units:
                unit.value_shard.mul_(20)
