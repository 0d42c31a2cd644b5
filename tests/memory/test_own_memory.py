"""Memory of this runtime in arrays, as a search takes it, beside the account, which plays each rank's actions."""

import random

import numpy as np
import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import rank_memory
from shardwright.planner.search import space
from shardwright.planner.search.constraints import Constraints

pytestmark = pytest.mark.long

_MOST_PLAYED = 1500  # microbatches, each once a stage, so that the account takes milliseconds


def job_of(model: str, nodes: int, batch: int) -> JobSpec:
    """A model on nodes of 8 GPUs."""
    return load_job(
        "llama3-405b-8k",
        [
            f"model.name={model}", "cluster.name=h100-node", f"cluster.nodes={nodes}",
            f"batch.global_batch_size={batch}",
            "plan.tp=1", "plan.pp=1", f"plan.dp={8 * nodes}", "plan.virtual_stages=1", "plan.schedule=1f1b",
            "plan.layout=[]", "cluster.software=shardwright",
        ],
    )  # fmt: skip


def drawn(job: JobSpec, number: int, seed: int) -> list[JobSpec]:
    """Plans of a job's space, without host memory."""
    rng = random.Random(seed)
    constraints = Constraints(
        keep={"offload_optimizer": 0.0, "offload_parameters": False, "offload_activations": False}
    )
    degrees = space.degrees(job, constraints)
    variant = space.variants_of(job, constraints, degrees)
    results: list[JobSpec] = []
    while len(results) < number:
        block = space.with_variant(job, constraints, degrees, rng.choice(variant))
        block = space.with_sharing(job, constraints, block)
        plan = block.plan(rng.randrange(len(block)), job) if len(block) else job
        if plan is not job and plan.num_microbatches * plan.plan.num_stages <= _MOST_PLAYED:
            results.append(plan)
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "nodes", "batch"), [("llama3-8b", 8, 64), ("gpt3-175b", 16, 256), ("mixtral-8x7b", 4, 64)]
)
def test_arrays_are_near_the_account(model: str, nodes: int, batch: int) -> None:
    """Half of all plans within 3 %, and nine of ten no further below than 25 %: those with few microbatches and much to
    compute again. The account judges the plans that a search shows."""
    ratios = []
    for job in drawn(job_of(model, nodes, batch), 40, seed=11):
        exact = max(rank.total_bytes for rank in job_memory(job))
        ratios.append(max(float(rank.total) for rank in rank_memory(run_of(job), shipped())) / exact)
    assert np.quantile(np.abs(np.log(ratios)), 0.5) < 0.03
    assert np.quantile(ratios, 0.1) > 0.75


@pytest.mark.sampled(3)
@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-175b", "mixtral-8x7b"])
def test_plain_plans_are_the_account(model: str, further: int) -> None:
    """Plans to start with: 1F1B, nothing computed again, state sharded or not. With further tokens a few percent
    more of what ZeRO 3 gathers is there than is said."""
    job = job_of(model, 8, 256)
    job = job.model_copy(update={"model": job.model.model_copy(update={"mtp_layers": further})})
    for zero, tp, pp in ((0, 8, 8), (1, 8, 4), (1, 2, 2), (2, 4, 4), (3, 8, 1), (3, 1, 4)):
        update = {"dp": 64 // (tp * pp), "tp": tp, "pp": pp, "zero": zero, "sequence_parallel": tp > 1}
        changes = {"moments": "bf16"} if zero in (1, 3) else {}
        if zero in (2, 3):
            changes |= {"master": "none", "gradients": "compute"}
        precision = job.precision.model_copy(update=changes)
        plan = job.model_copy(update={"plan": job.plan.model_copy(update=update), "precision": precision})
        for exact, result in zip(job_memory(plan), rank_memory(run_of(plan), shipped()), strict=True):
            assert float(result.total) == pytest.approx(exact.total_bytes, rel=0.05 if further else 0.03), (
                update,
                exact,
                result,
            )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "dualpipev"])
def test_one_rank_keeps_what_its_schedule_lets_wait(schedule: str) -> None:
    """GPipe runs all forwards first on one rank, too."""
    job = job_of("llama3-8b", 1, 64)
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"dp": 8, "pp": 1, "schedule": schedule})})
    for exact, result in zip(job_memory(job), rank_memory(run_of(job), shipped()), strict=True):
        assert float(result.activations) == pytest.approx(exact.activations_bytes, rel=0.03)


@pytest.mark.parametrize("zero", [2, 3])
def test_two_directions_share_state_without_replicas(zero: int) -> None:
    """DualPipe holds each stage twice, so that ZeRO gathers and reduces over its two ranks where dp is 1, too."""
    job = job_of("llama3-8b", 1, 64)
    plan = job.plan.model_copy(update={"dp": 1, "pp": 8, "schedule": "dualpipe", "zero": zero})
    job = job.model_copy(update={"plan": plan})
    for exact, result in zip(job_memory(job), rank_memory(run_of(job), shipped()), strict=True):
        assert float(result.buffers) == pytest.approx(exact.buffers_bytes, rel=0.05)


@pytest.mark.parametrize("gradients", ["float32", "compute"])
def test_updates_of_matrices_are_near_the_account(gradients: str) -> None:
    """Muon borrows for matrices that are exchanged together, of one layer or several."""
    job = job_of("llama3-8b", 8, 256)
    precision = job.precision.model_copy(update={"gradients": gradients})
    job = job.model_copy(update={"optimizer": OptimizerSpec(name="muon"), "precision": precision})
    for zero, tp, pp in ((1, 8, 1), (1, 1, 4), (2, 2, 2), (3, 8, 1), (3, 1, 1), (0, 8, 4)):
        update = {"dp": 64 // (tp * pp), "tp": tp, "pp": pp, "zero": zero, "sequence_parallel": tp > 1}
        plan = job.model_copy(update={"plan": job.plan.model_copy(update=update)})
        for exact, result in zip(job_memory(plan), rank_memory(run_of(plan), shipped()), strict=True):
            assert float(result.total) == pytest.approx(exact.total_bytes, rel=0.05), (update, exact, result)


@pytest.mark.parametrize("recompute", ["none", "full", "stage"])
@pytest.mark.parametrize("schedule", SCHEDULES.names)
def test_every_schedule_is_near_the_account(schedule: str, recompute: str) -> None:
    """The rank that needs most: within 9 % above and 4 % below."""
    facts = SCHEDULES[schedule]
    if schedule == "auto" or not facts.drains:  # a solver's order, and several versions of the weights
        pytest.skip("no closed form")
    job = job_of("llama3-8b", 1, 64)
    update = {
        "dp": 1, "pp": 8, "schedule": schedule, "virtual_stages": facts.stages_per_rank or 2, "recompute": recompute,
    }  # fmt: skip
    plan = job.plan.model_copy(update=update)
    job = job.model_copy(update={"plan": plan, "batch": job.batch.model_copy(update={"global_batch_size": 32})})
    exact = max(rank.total_bytes for rank in job_memory(job))
    ratio = max(float(rank.total) for rank in rank_memory(run_of(job), shipped())) / exact
    assert 0.96 < ratio < 1.09
