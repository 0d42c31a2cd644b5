"""Features of software: the catalog's own plans run on theirs, and a search can be held to it."""

import pytest

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.cost.calibration import shipped
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.search import search


def job(**plan: object) -> JobSpec:
    model = {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 11008, "vocab": 32000, "sequence": 2048}
    links = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
    cluster = {"device": "a100-sxm-80g", "devices_per_node": 8, "nodes": 1, "software": "megatron-2021"} | links
    return make_job(
        {
            "model": model, "cluster": cluster, "plan": plan or {"dp": 8}, "batch": {"global_batch_size": 16},
            "precision": {"compute": "bf16"},
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", catalog.names("jobs"))
def test_no_plan_of_the_catalog_needs_what_its_software_lacks(name: str) -> None:
    result = load_job(name)
    assert missing_features(software_of(result.cluster.software), result) == ()


def test_what_is_missing_is_named() -> None:
    of = job(tp=2, pp=2, cp=2, sequence_parallel=True, schedule="zb-h1", zero=1)
    assert missing_features(software_of("megatron-2021"), of) == (
        "schedule zb-h1", "ZeRO-1", "sequence parallel", "context parallel",
    )  # fmt: skip
    assert missing_features(software_of("megatron-core"), of) == ("schedule zb-h1",)
    for name in ("xla", "xla-2021"):  # a program that is differentiated as a whole has no order of its own
        assert missing_features(software_of(name), of) == ("schedule zb-h1",)
    assert missing_features(software_of("large-2024"), of) == ()


def test_a_search_for_software_finds_what_it_has_without_being_asked_to() -> None:
    free = constraints_of(["plan.recompute=none", "plan.microbatch_size=1", "plan.offload_optimizer=0.0"], [])
    software = software_of("megatron-2021")
    held = search(job(), free.as_software(software), shipped()).candidates
    best = search(job(), free, shipped(), num_shown=1).candidates[0]
    assert held and all(missing_features(software, candidate.job) == () for candidate in held)
    assert missing_features(software, best.job) == ()
    assert best.token_s == held[0].token_s
    with pytest.raises(PlanError, match="add schedules, zero_stages"):
        free.as_software(software_of("flash-2023"))


@pytest.mark.parametrize("name", ["xla", "xla-2021"])
def test_one_stage_needs_no_schedule(name: str) -> None:
    """Software without 1f1b has plans of one stage, which stand under it, and none of several."""
    kept = ["plan.recompute=none", "plan.microbatch_size=1", "plan.offload_optimizer=0.0", "plan.tp=1", "plan.cp=1"]
    software = software_of(name)
    base = job()
    held = constraints_of(kept, []).as_software(software)
    shown = search(base, held, shipped(), num_shown=50).candidates
    orders = {(candidate.job.plan.pp > 1, candidate.job.plan.schedule) for candidate in shown}
    assert (False, "1f1b") in orders and (True, "1f1b") not in orders
    assert orders - {(False, "1f1b")} <= {(True, schedule) for schedule in software.schedules or ()}
    free = constraints_of([*kept, "plan.pp=1"], [])
    steps_s = [
        search(base, constraints, shipped(), num_shown=1).candidates[0].token_s
        for constraints in (free, free.as_software(software))
    ]
    assert steps_s[0] == steps_s[1]


WITHOUT_PIPELINE = (
    *("transformers-2023", "transformers-2024", "transformers-2024-02", "transformers-2024-05", "transformers-2025"),
    *("torchtune", "torchtune-compile", "litgpt", "litgpt-compile"),
)


@pytest.mark.parametrize("name", WITHOUT_PIPELINE)
def test_software_without_a_pipeline_is_planned_without_stages(name: str) -> None:
    software, kept = software_of(name), ["plan.recompute=none", "plan.microbatch_size=1", "plan.tp=1", "plan.cp=1"]
    assert missing_features(software, job()) == ()
    assert missing_features(software, job(pp=2, dp=4))
    shown = search(job(), constraints_of(kept, []).as_software(software), shipped(), num_shown=8).candidates
    assert {candidate.job.plan.pp for candidate in shown} == {1}


def test_an_unknown_change_is_no_attention_kernel() -> None:
    """A change may be a dispatcher of tokens, graphs or an overlap, too."""
    with pytest.raises(KeyError, match="no change of software is called 'deepp'; did you mean deepep"):
        software_of("megatron-core+deepp")
    with pytest.raises(KeyError, match=r"called 'nothing'; there are: .*flash2.*graphs-step.*overlap-a2a"):
        software_of("megatron-core+nothing")
