"""Other software is offered the plans that it has, by the search, the recommendation and the reasons alike."""

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import searched
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.cost.calibration import shipped
from shardwright.planner.advice.neighbours import neighbours
from shardwright.planner.advice.recommendation import plans_of
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from support.planned import small_job

pytestmark = pytest.mark.long

KNOWN = ["megatron-core", "megatron-2021", "megatron-2022", "megatron-deepspeed", "nemo", "llama3", "hai-llm"]


def priced_as(software: str, model: str = "dense", **plan: object) -> JobSpec:
    """A small job whose cluster runs other software."""
    job = small_job(model, 2)
    cluster = job.cluster.model_copy(update={"software": software})
    return job.model_copy(update={"cluster": cluster, "plan": job.plan.model_copy(update=plan)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("software", KNOWN)
def test_what_is_recommended_is_what_the_software_has(software: str) -> None:
    job = priced_as(software)
    advice = plans_of(job, Constraints(), shipped(), num_shown=3)
    assert advice.recommendation is not None and any(software in sentence for sentence in advice.left_out)
    for plan in (*advice.plans, advice.recommendation.plan):
        assert missing_features(software_of(software), plan.job) == ()


def test_reasons_compare_with_what_the_software_has() -> None:
    job = priced_as("megatron-2021", dp=4, pp=2, zero=0)
    near = neighbours(job, searched())
    assert near and all(missing_features(software_of("megatron-2021"), one.job) == () for one in near)


@pytest.mark.parametrize("software", ["llama3", "deepspeed-2025"])
@pytest.mark.parametrize("cp", [1, 2])
def test_plans_that_share_no_sequence_are_there_whatever_methods_software_has(software: str, cp: int) -> None:
    """Neither has a ring: a search for it has plans with cp and without all the same."""
    constraints, _ = within_known(priced_as(software), Constraints({"cp": cp}))
    advice = plans_of(priced_as(software), constraints, shipped(), num_shown=2)
    assert advice.plans and {one.job.plan.cp for one in advice.plans} == {cp}


def test_what_is_kept_is_offered_and_marked() -> None:
    """A user who keeps a ZeRO stage that the software lacks is taken at his word."""
    job = priced_as("megatron-core")
    constraints, _ = within_known(job, Constraints({"zero": 3}))
    assert constraints.allows("zero", 3) and not constraints.allows("schedule", "zb-v")


@pytest.mark.parametrize(
    ("software", "plan", "words"),
    [
        ("megatron-core", {"recompute": "stage"}, "recomputation stage"),
        ("megatron-core", {"recompute": "selective", "recompute_operators": ["qkv"]}, "recomputation of qkv"),
        ("megatron-core", {"zero": 3, "offload_parameters": True}, "parameters in host memory"),
        ("megatron-2022", {"pp": 2, "layout": [2, 4]}, "stages of uneven layers"),
        ("megatron-2021", {"recompute": "selective"}, "recomputation selective"),
        ("llama3", {"cp": 2, "cp_method": "ulysses"}, "context parallel by ulysses"),
        ("megatron-deepspeed", {"zero": 1, "zero_ranks": 4}, "shards over a part of the replicas"),
    ],
)
def test_what_software_lacks_is_named(software: str, plan: dict[str, object], words: str) -> None:
    assert words in missing_features(software_of(software), priced_as(software, **plan))


def test_operators_are_compared_as_a_set() -> None:
    plan = {"recompute": "selective", "recompute_operators": ["activation", "norm"]}
    assert missing_features(software_of("megatron-core"), priced_as("megatron-core", **plan)) == ()
