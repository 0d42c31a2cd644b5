"""A plan with state in host memory is recommended only where it is surely faster than those without."""

from dataclasses import replace

import pytest

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import shipped
from shardwright.planner.advice import recommendation
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.confidence import fitted_spread
from shardwright.planner.advice.recommendation import TOLD_APART, plans_of, surely_hosted
from shardwright.planner.search.constraints import Constraints, constraints_of
from support.planned import small_job

pytestmark = pytest.mark.long

QUICK = ["plan.recompute=full", "plan.cp=1", "plan.tp=1", "plan.pp=1", "plan.schedule=1f1b", "plan.microbatch_size=1"]
HOSTED = constraints_of([*QUICK, "plan.offload_optimizer=1"], [])
FREE = constraints_of(QUICK, [])


@pytest.fixture(scope="module")
def job() -> JobSpec:
    job = small_job("dense")
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": "deepspeed-2024"})})


@pytest.fixture(scope="module")
def hosted(job: JobSpec) -> Advice:
    return plans_of(job, HOSTED, shipped())


@pytest.fixture(scope="module")
def on_device(job: JobSpec) -> Advice:
    return plans_of(job, FREE, shipped())


def times_as_long(advice: Advice, factor: float, other: Advice) -> Advice:
    """The advice, whose first plan takes so many times as long as the other's."""
    first, *others = advice.plans
    total = factor * other.plans[0].token_s * first.job.tokens_per_step
    return replace(advice, plans=[replace(first, time=replace(first.time, total=total)), *others])


@pytest.mark.parametrize(("factor", "is_hosted"), [(0.9, False), (0.5, True)])
def test_a_gain_within_the_errors_of_such_predictions_is_none(
    hosted: Advice, on_device: Advice, factor: float, is_hosted: bool
) -> None:
    assert fitted_spread().ratio(TOLD_APART, ["offload"]) > 1.2
    chosen = surely_hosted(times_as_long(hosted, factor, on_device), on_device)
    assert (chosen.plans[0].job.plan.offload_optimizer > 0) is is_hosted
    told = [sentence for sentence in chosen.left_out if "state in host memory are left out" in sentence]
    assert len(told) == (not is_hosted)


def test_without_another_plan_that_with_state_on_the_host_is_taken(hosted: Advice, on_device: Advice) -> None:
    assert surely_hosted(hosted, replace(on_device, plans=[])) is hosted


def test_every_command_asks(job: JobSpec, hosted: Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose fastest plan keeps its state on the host goes on without such plans, unless they are asked for."""
    asked: list[Constraints] = []
    search = recommendation._plans_of

    def first_hosted(job: JobSpec, constraints: Constraints, *rest: object) -> Advice:
        asked.append(constraints)
        return search(job, HOSTED if len(asked) == 1 else constraints, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(recommendation, "_plans_of", first_hosted)
    advice = plans_of(job, FREE, shipped())
    assert len(asked) == 2 and advice.plans[0].job.plan.offload_optimizer == 0
    asked.clear()
    assert plans_of(job, HOSTED, shipped()).plans[0].job.plan.offload_optimizer == 1 and len(asked) == 1
