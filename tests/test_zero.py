"""ZeRO: every stage of it computes what one rank computes, with every other strategy."""

from typing import Any

import pytest
import torch

from cases import against_one_rank, record, small_job
from ranks import run_on_mesh

STEPS = 10
STAGES = (1, 2, 3)
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "small-buckets": {"dp": 2, "bucket_mib": 0.01},
    "tp2": {"dp": 2, "tp": 2},
    "sp2": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"dp": 2, "pp": 2},
    "interleaved": {"dp": 2, "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    "zb-v": {"dp": 2, "pp": 2, "schedule": "zb-v"},
    "dualpipe": {"dp": 1, "pp": 2, "schedule": "dualpipe"},
    "hybrid": {"dp": 4, "zero_ranks": 2},
}


@pytest.mark.parametrize("kind", ["llama", "gpt-tied"])
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("plan", PLANS)
def test_equals_one_rank(plan: str, zero: int, kind: str) -> None:
    """After ten steps whose gradients are accumulated over several microbatches, and clipped."""
    if kind == "gpt-tied" and plan in ("dp4", "small-buckets", "interleaved", "dualpipev"):
        pytest.skip("one model is enough here")
    verdict = against_one_rank(small_job(kind, zero=zero, batch=8, **PLANS[plan]), STEPS)
    assert verdict.max_loss_difference < 1e-6
    assert verdict.max_parameter_relative_difference < 1e-6


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}])
def test_all_stages_are_bitwise_equal(plan: dict[str, Any]) -> None:
    """Two replicas and one microbatch: then every stage adds the same two numbers."""
    records = [
        run_on_mesh(job, record, job, STEPS) for job in (small_job(zero=zero, batch=2, **plan) for zero in range(4))
    ]
    for ranks in records[1:]:
        for rank, first in zip(ranks, records[0], strict=True):
            assert rank.steps == first.steps
            for (place, box), (_, expected) in zip(rank.boxes, first.boxes, strict=True):
                assert torch.equal(box, expected), place.name
