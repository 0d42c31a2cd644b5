"""A plan with state in host memory is recommended only where it is surely faster than those without."""

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import shipped
from shardwright.planner.advice import recommendation
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.confidence import fitted_spread
from shardwright.planner.advice.recommendation import TOLD_APART, _is_hosted, plans_of, surely_hosted
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.search import search
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


def test_plans_that_are_no_faster_on_the_host_change_nothing(on_device: Advice) -> None:
    assert surely_hosted(replace(on_device, plans=[]), on_device) is on_device
    assert surely_hosted(on_device, on_device) is on_device


def test_a_slower_plan_on_the_host_is_not_told_as_a_gain(hosted: Advice, on_device: Advice) -> None:
    assert surely_hosted(times_as_long(hosted, 1.1, on_device), on_device) is on_device


def test_plans_that_fit_on_their_devices_are_not_looked_for_on_the_host(job: JobSpec) -> None:
    """A search without limits finds plans on the device; one for plans on the host alone finds none of these, unless
    the device is too small for them."""
    assert not _is_hosted(search(job, FREE, shipped(), 1).candidates[0].job)
    assert not search(job, FREE, shipped(), 1, hosted_only=True).candidates
    crowded = job.model_copy(update={"model": job.model.model_copy(update={"layers": 200})})
    every, hosted = (search(crowded, FREE, shipped(), 1, hosted_only=only).candidates for only in (False, True))
    assert hosted[0].job.plan == every[0].job.plan and _is_hosted(hosted[0].job)


def test_where_nothing_fits_without_it_state_goes_to_the_host(job: JobSpec) -> None:
    crowded = job.model_copy(update={"model": job.model.model_copy(update={"layers": 200})})
    nowhere = constraints_of([*QUICK, "plan.offload_optimizer=0", "plan.offload_parameters=false"], [])
    assert not plans_of(crowded, nowhere, shipped()).plans
    assert plans_of(crowded, FREE, shipped()).plans[0].job.plan.offload_optimizer == 1


def test_every_command_asks(job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without state on the host are searched first, and all only where those with it are surely faster, or where
    they are asked for."""
    asked: list[Constraints] = []
    search = recommendation._plans_of

    def noted(job: JobSpec, constraints: Constraints, *rest: Any, **options: Any) -> Advice:
        asked.append(constraints)
        return search(job, constraints, *rest, **options)

    monkeypatch.setattr(recommendation, "_plans_of", noted)
    advice = plans_of(job, FREE, shipped())
    assert len(asked) == 1 and advice.plans[0].job.plan.offload_optimizer == 0
    asked.clear()
    assert plans_of(job, HOSTED, shipped()).plans[0].job.plan.offload_optimizer == 1 and asked == [HOSTED]
    asked.clear()
    monkeypatch.setattr(recommendation, "surely_hosted", lambda hosted, on_device: plans_of(job, HOSTED, shipped()))
    plans_of(job, FREE, shipped())
    assert asked[-1] == FREE and len(asked) == 3
