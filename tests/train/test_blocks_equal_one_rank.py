"""Norms after the halves of a block or around them, halves at once, scales, caps, and experts with biases or with their
weights before them: any plan trains to what one rank trains to, and recomputes to the same bits."""

from typing import Any

import pytest

from support.cases import against_one_rank, record, remembered
from support.ranks import run_on_mesh
from support.rounding import check_rounding
from support.same_bits import NUM_STEPS, assert_same_bits, of_four_microbatches

SEQUENCE = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp-zb-v": {"pp": 2, "schedule": "zb-v"} | SEQUENCE,
    "tp2-sp-dp2-zero3": {"dp": 2, "zero": 3} | SEQUENCE,
    "pp2-zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "ep2": {"dp": 2, "ep": 2, "zero": 1},
    "ep2-tp2-sp": {"dp": 2, "ep": 2, "zero": 3} | SEQUENCE,
    "whole-experts": {"ep": 2, "expert_tp": 1} | SEQUENCE,
}
EVERY = [
    ("after", "tp2-sp-zb-v"), ("after", "tp2-sp-dp2-zero3"), ("around", "tp2"), ("unweighed", "tp2-sp-dp2-zero3"),
    ("one-norm", "tp2"), ("one-norm", "tp2-sp-dp2-zero3"), ("one-norm", "pp2-zb-h1"), ("two-norms", "tp2-sp-zb-v"),
    ("gpt-oss-moe", "ep2"), ("gpt-oss-moe", "ep2-tp2-sp"), ("gpt-oss-moe", "whole-experts"),
    ("llama4-moe", "ep2-tp2-sp"), ("gpt-j", "tp2-sp-dp2-zero3"), ("gpt-j", "pp2-zb-h1"), ("command", "tp2-sp-zb-v"),
]  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "all": {"recompute": "selective", "recompute_operators": ["norm", "qkv", "attention", "up", "activation"]},
}
RECOMPUTED = ["after", "around", "one-norm", "two-norms", "gpt-oss-moe", "llama4-moe", "plain-input"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "plan"), EVERY)
def test_plan_equals_one_rank(kind: str, plan: str) -> None:
    fields = PLANS[plan]
    job = of_four_microbatches(kind, **fields)
    verdict = against_one_rank(job, NUM_STEPS)
    if fields.keys() <= {"pp", "schedule"}:
        assert verdict.bitwise
    check_rounding(verdict, job)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_recomputed_has_the_same_bits(kind: str, policy: str) -> None:
    kept, again = (of_four_microbatches(kind, **how) for how in ({}, POLICIES[policy]))
    assert_same_bits(run_on_mesh(again, record, again, NUM_STEPS), remembered(kept, record, NUM_STEPS))
