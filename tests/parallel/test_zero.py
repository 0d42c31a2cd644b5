"""ZeRO: every stage of it computes what one rank computes, with every other strategy."""

from typing import Any

import pytest
import torch

from shardwright.config.precision import PrecisionSpec
from shardwright.measure.verdict import Record
from support.cases import against_one_rank, record, small_job
from support.ranks import run_on_mesh
from support.rounding import check_rounding

# Steps: the second is of weights and an optimizer that the first has moved.
FEW, MANY = 2, 6
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "small-buckets": {"dp": 2, "bucket_mib": 0.01},
    # Each layer and microbatch is many collectives over tp: two of each here.
    "tp2": {"dp": 2, "tp": 2, "microbatch_size": 2, "layers": 2},
    "sp2": {"dp": 2, "tp": 2, "sequence_parallel": True, "microbatch_size": 2, "layers": 2},
    "pp2": {"dp": 2, "pp": 2},
    "interleaved": {"dp": 2, "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    "zb-v": {"dp": 2, "pp": 2, "schedule": "zb-v"},
    "dualpipev": {"dp": 2, "pp": 2, "schedule": "dualpipev"},
    "dualpipe": {"dp": 1, "pp": 2, "schedule": "dualpipe"},
    "hybrid": {"dp": 4, "zero_ranks": 2},
}


# The first stage differs from the second in when gradients are sharded; where work is cut otherwise it need not be run.
CASES = [
    (plan, zero, kind)
    for plan in PLANS
    for zero in (1, 2, 3)
    for kind in ("llama", "gpt-tied")
    if (zero > 1 or plan in ("dp2", "sp2", "hybrid"))
    and (kind == "llama" or plan not in ("dp4", "small-buckets", "interleaved", "dualpipev"))
]
# One plan of each sort, over each stage, goes on for longer.
LONG = (("dp2", "llama"), ("sp2", "gpt-tied"), ("pp2", "gpt-tied"), ("hybrid", "gpt-tied"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("plan", "zero", "kind"), CASES)
def test_equals_one_rank(plan: str, zero: int, kind: str) -> None:
    """After steps whose gradients are accumulated over several microbatches, and clipped."""
    job = small_job(kind, zero=zero, batch=8, **PLANS[plan])
    check_rounding(against_one_rank(job, MANY if (plan, kind) in LONG else FEW), job)


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}])
def test_all_stages_are_bitwise_equal(plan: dict[str, Any]) -> None:
    """Two replicas and one microbatch: then every stage adds the same two numbers."""
    records = [
        run_on_mesh(job, record, job, FEW) for job in (small_job(zero=zero, batch=2, **plan) for zero in range(4))
    ]
    for ranks in records[1:]:
        for rank, first in zip(ranks, records[0], strict=True):
            assert rank.steps == first.steps
            for (place, box), (_, expected) in zip(rank.boxes, first.boxes, strict=True):
                assert torch.equal(box, expected), place.name


@pytest.mark.parametrize(
    "offload",
    [
        {"zero": 0, "offload_optimizer": 1.0},
        {"zero": 1, "offload_optimizer": 0.3},
        {"zero": 3, "offload_optimizer": 1.0, "offload_parameters": True},
    ],
)
@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_offload_changes_no_bit(offload: dict[str, Any], compute: str) -> None:
    def run(**plan: Any) -> list[Record]:
        job = small_job("gpt-tied", dp=2, batch=4, **plan)
        job = job.model_copy(update={"precision": PrecisionSpec(compute=compute)})
        return run_on_mesh(job, record, job, FEW)

    for rank, expected in zip(run(**offload), run(zero=offload["zero"]), strict=True):
        assert rank.steps == expected.steps
        for (place, box), (_, other) in zip(rank.boxes, expected.boxes, strict=True):
            assert torch.equal(box, other), place.name


def test_parameters_can_wait_on_the_host_of_a_single_replica() -> None:
    verdict = against_one_rank(small_job(zero=3, pp=2, reduce_each="run", offload_parameters=True), FEW)
    assert verdict.bitwise
