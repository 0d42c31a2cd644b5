"""Latent attention, norms of heads, windows and other rules: any plan trains to what one rank trains to, recomputes to
the same bits, and moves what it should between the ranks of tp."""

from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.train.build import build
from support.cases import against_one_rank, record, remembered, small_job
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding
from support.same_bits import NUM_STEPS, assert_same_bits, of_four_microbatches

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


# Queries that are not made through latents are cut over tp as others are: two plans of tp, and recomputed on one rank.
EVERY = [(kind, plan) for kind in ("qwen", "latent") for plan in PLANS]
EVERY += [("latent-plain-queries", plan) for plan in ("tp4-sp-zero1", "tp2-sp-zb-v")]
# Of rules and positions each kind under one plan; under cp in test_context_plans.py.
EVERY += [("olmo", "tp4-sp-zero1"), ("llama4", "tp4-sp-zero1"), ("gemma", "tp2-sp-zb-v")]
EVERY += [("bloom", "tp2-dp2-zero3"), ("gpt-oss", "tp2-dp2-zero3")]
RECOMPUTED = [("qwen", "one"), ("qwen", "tp2-sp-zb-v"), ("latent", "one"), ("latent", "tp2-sp-zb-v")]
RECOMPUTED += [("latent-plain-queries", "one"), ("gpt-oss", "tp2-sp-zb-v"), ("gemma", "one"), ("llama4", "one")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "plan"), EVERY)
def test_plan_equals_one_rank(kind: str, plan: str) -> None:
    fields = PLANS[plan]
    job = of_four_microbatches(kind, **fields)
    verdict = against_one_rank(job, NUM_STEPS)
    if "tp" not in fields and "dp" not in fields:
        assert verdict.bitwise
    check_rounding(verdict, job)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "plan"), RECOMPUTED)
def test_recomputed_has_the_same_bits(kind: str, plan: str, policy: str) -> None:
    fields = PLANS.get(plan, {})
    kept, again = (of_four_microbatches(kind, **fields, **how) for how in ({}, POLICIES[policy]))
    assert_same_bits(run_on_mesh(again, record, again, NUM_STEPS), remembered(kept, record, NUM_STEPS))


@leaves_nothing
def moved(mesh: Mesh, job: JobSpec) -> dict[str, tuple[int, int]]:
    """Calls and bytes over tp of one attention, forward and backward."""
    stage = build(job, mesh).stages[0]
    x = stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()
    run, attention = stage.forward_pass(Microbatch(1, 0, 0)), stage.layers["0"].attention
    mesh.ledger.clear()
    attention.out(attention.attend(attention.project(x), run)).sum().backward()
    return {kind: (tally.count, tally.num_bytes) for (kind, _), tally in mesh.ledger.tallies.items()}


@pytest.mark.parametrize("kind", ["latent", "latent-plain-queries"])
def test_what_crosses_the_ranks_before_the_heads(kind: str) -> None:
    """The latents, 10 + 12 + 4 wide, and not the residual stream of 32; that only where queries are made from it."""
    tokens = 16
    stream, entering = 4 * tokens * 32, 4 * tokens * (26 if kind == "latent" else 32)
    job = small_job(kind, tp=2)
    assert run_on_mesh(job, moved, job) == [{"all_reduce": (2, entering + stream)}] * 2
    # Forward gathers what enters and scatters what leaves; backward the other way, and gathers what enters again.
    job = small_job(kind, tp=2, sequence_parallel=True)
    expected = {"all_gather": (3, 2 * entering + stream), "reduce_scatter": (2, entering + stream)}
    assert run_on_mesh(job, moved, job) == [expected] * 2
