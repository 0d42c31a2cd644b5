"""A rate that one strategy alone needs and nobody knows leaves that strategy out of the search, and nothing else."""

import pytest

from shardwright.config import catalog
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import device_of, shipped
from shardwright.planner.advice.recommendation import best_plans, explained
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.objectives import Objective
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.search import search
from shardwright.report.plan_screen import plan_screen
from shardwright.report.rendered import rendered
from support.planned import small_job

pytestmark = pytest.mark.long

QUICK = constraints_of(["plan.recompute=full", "plan.cp=1", "plan.schedule=1f1b", "plan.microbatch_size=1"], [])


def job_on(device: str) -> JobSpec:
    """The small dense job, in a number type that the device has."""
    job, spec = small_job("dense"), device_of(device)
    compute = next(number for number in ("bf16", "fp16", "float32") if spec.peak_flops(number))
    cluster = job.cluster.model_copy(update={"device": device})
    return job.model_copy(
        update={"cluster": cluster, "precision": job.precision.model_copy(update={"compute": compute})}
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", catalog.names("devices"))
def test_every_device_of_the_catalog_is_planned(device: str) -> None:
    """Where the model fits a plan is found, and where its host is not known no plan keeps anything there."""
    job = job_on(device)
    advice = best_plans(job, QUICK, shipped(), Objective(), 3)
    assert advice.tally.num_priced > 0
    knows = device_of(device).knows_host
    assert bool(advice.left_out) != knows
    for plan in advice.plans:
        assert plan.fits and fits(job, plan.memory, room_bytes(job))
        assert knows or (plan.job.plan.offload_optimizer, plan.job.plan.offload_parameters) == (0.0, False)


def test_the_rest_is_explained_and_one_line_says_what_is_missing() -> None:
    job = job_on("h20")
    advice = explained(best_plans(job, QUICK, shipped(), Objective(), 2), job, QUICK, shipped())
    assert advice.reasons and not any(reason.field.startswith("offload") for reason in advice.reasons)
    text = " ".join(rendered(plan_screen(advice)).split())
    assert text.count("Plans that offload are left out: nothing is known of the host beside h20") == 1


def test_what_the_user_keeps_is_asked_for() -> None:
    keeping = constraints_of(["plan.offload_optimizer=1.0"], [])
    with pytest.raises(KeyError, match="h20 has no known host; add host_gb_per_s"):
        search(job_on("h20"), keeping, shipped(), 1)


def test_a_recipe_of_8_bits_without_a_rate_is_left_out() -> None:
    constraints = constraints_of([], [], "rowwise")
    narrowed, (of_host, of_recipe) = within_known(job_on("a40"), constraints)
    assert narrowed.float8 == "none" and "float8 rowwise" in of_recipe and "host" in of_host
    assert within_known(job_on("h100-sxm"), constraints) == (constraints, [])
