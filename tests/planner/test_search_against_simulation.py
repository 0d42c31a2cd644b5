"""The plan that is found, against every plan of a reduced space simulated in full, action by action."""

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import fullest
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.search import search
from shardwright.simulate.full_step import simulated_step
from support.planned import all_plans

pytestmark = pytest.mark.long


def job() -> JobSpec:
    """A model of 13 billion parameters on two nodes of eight devices: nothing but a pipeline or tp makes it fit."""
    model = {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824, "vocab": 32000, "sequence": 4096}
    links = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
    cluster = {"name": "two-nodes", "device": "a100-sxm-80g", "devices_per_node": 8, "nodes": 2} | links
    cluster |= {"software": "large-2024"}
    return make_job(
        {
            "model": model, "cluster": cluster, "plan": {"dp": 16}, "batch": {"global_batch_size": 16},
            "precision": {"compute": "bf16"},
        }
    )  # fmt: skip


REDUCED = constraints_of(
    [
        "plan.cp=1", "plan.zero=1", "plan.zero_ranks=0", "plan.recompute=none", "plan.microbatch_size=1",
        "plan.offload_optimizer=0.0",
    ],
    ["plan.virtual_stages=1,2", "plan.tp=1,2"],
)  # fmt: skip


def test_the_plan_found_is_the_fastest_of_all_that_are_simulated() -> None:
    plans = []
    for block in all_plans(job(), REDUCED):
        plans += [block.plan(index, job()) for index in range(len(block))]
    plans = [plan for plan in plans if fits(plan, fullest(plan, shipped()), room_bytes(plan))]
    assert len(plans) > 30
    fastest = min(float(simulated_step(plan, shipped()).total) for plan in plans)
    result = search(job(), REDUCED, shipped(), num_shown=6)
    simulated = [float(simulated_step(candidate.job, shipped()).total) for candidate in result.candidates]
    assert min(simulated) <= fastest * (1 + 1e-9)
