"""Latent attention, and norms of heads: any plan trains to what one rank trains to, and recomputes to the same bits."""

from typing import Any

import pytest

from cases import ATTENTIONS, against_one_rank, record, small_job
from ranks import run_on_mesh
from test_layer_recompute import assert_same_bits, with_dropout

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4-sp-zero1": {"tp": 4, "sequence_parallel": True, "zero": 1},
    "pp2-zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "tp2-sp-zb-v": {"pp": 2, "schedule": "zb-v", "tp": 2, "sequence_parallel": True},
    "tp2-dp2-zero3": {"tp": 2, "dp": 2, "zero": 3},
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "all": {"recompute": "selective", "recompute_operators": ["norm", "qkv", "attention", "up", "activation"]},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_plan_equals_one_rank(kind: str, plan: str) -> None:
    fields = PLANS[plan]
    verdict = against_one_rank(with_dropout(small_job(kind, **fields), 0.1))
    if "tp" not in fields and "dp" not in fields:
        assert verdict.bitwise
    assert verdict.max_loss_difference <= 2e-6
    assert verdict.max_grad_norm_relative_difference <= 1e-6
    assert verdict.max_parameter_relative_difference <= 1e-5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", ["one", "tp2-sp-zb-v"])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_recomputed_has_the_same_bits(kind: str, plan: str, policy: str) -> None:
    fields = PLANS.get(plan, {})
    kept, again = (with_dropout(small_job(kind, **fields, **how), 0.1) for how in ({}, POLICIES[policy]))
    assert_same_bits(run_on_mesh(again, record, again, 2), run_on_mesh(kept, record, kept, 2))
