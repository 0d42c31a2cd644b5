"""A few draws of the fuzzers of plans and models; `make fuzz` runs more, with other seeds."""

import pytest

from fuzz import models, plans
from fuzz.draw import draw

SEED = 2026
NUM_PLANS, NUM_MODELS = 24, 12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(NUM_PLANS))
def test_a_plan_computes_what_one_rank_does(number: int) -> None:
    fields = draw(SEED, number)
    result = plans.run_twice(fields)
    assert result.kind in ("equal", "refused", "tie"), f"{result}\n{plans.as_command(fields)}"
    assert all(len(reason) > 20 for reason in result.reasons)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(NUM_MODELS))
def test_one_rank_computes_what_a_plain_implementation_does(number: int) -> None:
    fields = draw(SEED + 1, number)
    result = plans.run_twice(fields, models.run)
    assert result.kind in ("equal", "refused", "tie"), f"{result}\n{plans.as_command(fields)}"


def test_most_draws_are_jobs() -> None:
    """A generator of what is always refused would find nothing."""
    accepted = 0
    for number in range(200):
        try:
            plans.accepted(draw(SEED, number))
        except plans.PlanError:
            continue
        accepted += 1
    assert accepted > 100


def test_a_difference_is_found() -> None:
    """Replicas that do not sum their gradients are another computation, and told as one."""
    fields = plans.with_field(draw(SEED, 0), ("plan",), {"dp": 2, "microbatch_size": 1})
    fields = plans.with_field(fields, ("model",), {"layers": 1, "hidden": 8, "heads": 2, "vocab": 17, "sequence": 6})
    fields = plans.with_field(fields, ("precision",), None) | {"batch": {"global_batch_size": 4}}
    job = plans.accepted(fields)
    alone = plans.reference_job(job)
    wanted = plans.run_on_mesh(alone, plans.trace, alone)
    other = alone.model_copy(update={"batch": alone.batch.model_copy(update={"global_batch_size": 2})})
    half = plans.run_on_mesh(other, plans.trace, other)
    assert plans.judged(job, half, alone, wanted, 60.0).kind == "differs"
