"""The best plans to which there is no objection: not what is left of those that a search finds."""

from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.rank_order import DEFAULT_ORDER
from shardwright.cost.calibration import shipped
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.objections import Objection, plans_without_objection
from shardwright.planner.advice.recommendation import plans_of
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.objectives import Objective
from support.planned import small_job

FEW = Constraints({"cp": 1}, among={"schedule": ("1f1b", "zb-h1", "zb-v"), "zero": (0, 1, 2), "recompute": ("none",)})


def to_sharding_and_some_schedules(job: JobSpec) -> Objection | None:
    refused: dict[str, Any] = {"zero": (1, 2), "schedule": ("zb-h1", "zb-v")}
    values = {name: getattr(job.plan, name) for name in refused if getattr(job.plan, name) in refused[name]}
    return Objection(f"has no {values}", values) if values else None


def answer(constraints: Constraints) -> tuple[Advice, Objection | None]:
    return plans_without_objection(
        small_job("dense", 2), constraints, shipped(), Objective(), 4, objection=to_sharding_and_some_schedules
    )


@pytest.mark.long
def test_what_is_objected_to_is_searched_without() -> None:
    """The answer is that of a search held to what has no objection, though no search was told so."""
    advice, first = answer(FEW)
    held = constraints_of(["plan.recompute=none", "plan.cp=1", "plan.zero=0", "plan.schedule=1f1b"], [])
    expected = plans_of(small_job("dense", 2), held, shipped(), num_shown=4)
    assert first is not None and first.fields
    assert advice.plans[0].token_s == expected.plans[0].token_s
    assert [to_sharding_and_some_schedules(plan.job) for plan in advice.plans] == [None] * len(advice.plans)
    assert advice.plans[0].first_is_faster is None and all(plan.first_is_faster for plan in advice.plans[1:])
    assert advice.recommendation is not None and advice.recommendation.plan is advice.plans[0]


def test_without_a_usable_plan_the_objection_to_the_best_is_told() -> None:
    job, reason = small_job("dense", 2), Objection("nothing is said of it")
    advice, first = plans_without_objection(job, FEW, shipped(), Objective(), 2, objection=lambda _: reason)
    assert advice.plans == [] and advice.recommendation is None and first is reason


def test_values_that_are_left_out() -> None:
    kept = constraints_of(["plan.zero=1"], [])
    left = kept.without({"zero": [1], "schedule": ["gpipe"], "layout": [[3, 1]], "order": ["pp-dp-tp"]})
    left = left.without({"schedule": ["1f1b"], "zero_ranks": [4]})
    assert left.allows("zero", 1)  # the user keeps it
    assert not left.allows("schedule", "gpipe") and not left.allows("schedule", "1f1b")
    assert left.allows("schedule", "zb-v")
    assert left.allows("layout", []) and not left.allows("layout", [2, 2])
    assert left.allows("zero_ranks", 0) and not left.allows("zero_ranks", 4)
    assert left.keep["order"] == DEFAULT_ORDER
