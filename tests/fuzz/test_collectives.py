"""The account of a rank's collectives is what the rank does, dry: a sample of fuzz/collectives.py, small jobs alone."""

from functools import cache
from typing import Any, get_args

import pytest

from fuzz.collectives import DEVICES, drawn_rank, jobs, wrong
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.gate_facts import GATES
from shardwright.config.job import JobSpec
from shardwright.config.moe import AuxLoss, Scope
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES

pytestmark = pytest.mark.long

SEED, NUM_DRAWN, MOST_PASSES, NUM_PARTS = 80, 190, 12, 10
LEAST_COMPARED = 100


@cache
def drawn() -> dict[int, JobSpec]:
    """The jobs by their numbers, none of which takes long."""
    return dict(jobs(SEED, range(NUM_DRAWN), MOST_PASSES))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_account_is_what_a_rank_does(part: int) -> None:
    """On one kind of device each; the fuzzer takes all."""
    result = {
        f"{SEED}:{number} on {device}": more
        for number, job in drawn().items()
        if number % NUM_PARTS == part
        for device in [DEVICES[number // NUM_PARTS % len(DEVICES)]]
        if (more := wrong(job, drawn_rank(number, job), device))
    }
    assert not result


def test_every_strategy_is_compared() -> None:
    """With every value of every field of a plan that decides what a rank sends."""
    results = list(drawn().values())
    assert len(results) >= LEAST_COMPARED
    plans = [job.plan for job in results]
    moes = [job.model.moe for job in results if job.model.moe.experts]
    wanted: list[tuple[set[Any], tuple[Any, ...]]] = [
        ({p.schedule for p in plans} | {"sequential"}, SCHEDULES.names),
        ({p.recompute for p in plans} | {"budget"}, RECOMPUTES.names),  # a budget is met by layers' own policies
        ({p.compress for p in plans if p.replicas > 1}, COMPRESSIONS.names),
        ({p.cp_method for p in plans if p.cp > 1}, CONTEXT_METHODS.names),
        ({p.zero for p in plans if p.replicas > 1}, (0, 1, 2, 3)),
        ({p.sequence_parallel for p in plans if p.tp > 1}, (False, True)),
        ({p.dispatch for p in plans if p.ep > 1}, ("direct", "node-aware")),
        ({p.expert_tp for p in plans if p.tp > 1}, (0, 1)),
        ({p.zero_ranks not in (0, p.replicas) for p in plans}, (False, True)),
        ({p.offload_parameters for p in plans}, (False, True)),
        ({p.offload_activations for p in plans}, (False, True)),
        ({p.offload_optimizer > 0 for p in plans}, (False, True)),
        ({bool(p.layout) for p in plans}, (False, True)),
        ({m.gate for m in moes}, GATES.names),
        ({m.aux_loss for m in moes}, get_args(AuxLoss)),
        ({m.aux_scope for m in moes}, get_args(Scope)),
        ({m.shared_gate for m in moes}, (False, True)),
        ({job.precision.float8 for job in results if job.plan.tp > 1}, ("none", *FLOAT8_RECIPES)),
        ({job.precision.compute for job in results}, ("float32", "bf16", "fp16")),
        ({job.model.tied_embeddings for job in results if job.plan.pp > 1}, (False, True)),
        ({job.model.mtp_layers > 0 for job in results if job.plan.pp > 1}, (False, True)),
        ({job.model.mtp_layers > 0 for job in results if job.plan.zero == 3}, (False, True)),
        ({job.data.separate_documents for job in results if job.plan.dp > 1}, (False, True)),
        ({job.model.is_latent for job in results if job.plan.tp > 1}, (False, True)),
    ]
    missing = [set(every) - values for values, every in wanted if set(every) - values]
    assert not missing
