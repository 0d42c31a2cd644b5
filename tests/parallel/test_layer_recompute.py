"""Recomputation in layers changes what is kept and nothing else: every result has the same bits as without it."""

from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, record, remembered, small_job
from support.ranks import leaves_nothing, run_on_mesh
from support.same_bits import NUM_STEPS, assert_same_bits, of_four_microbatches

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "stage": {"recompute": "stage"},
    "layers": {"recompute": "layers", "recompute_layers": [["layer"], [], ["norm"], ["attention", "qkv"]]},
    "every-other": {"recompute": "full", "recompute_every": 2},
    "attention": {"recompute": "selective"},
    "norm": {"recompute": "selective", "recompute_operators": ["norm"]},
    "activation": {"recompute": "selective", "recompute_operators": ["activation"]},
    "cheap": {"recompute": "selective", "recompute_operators": ["norm", "attention", "activation"]},
    "all": {"recompute": "selective", "recompute_operators": ["norm", "qkv", "attention", "up", "activation"]},
}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "dp2-zero3": {"dp": 2, "zero": 3},
    "zb-v-tp2-sp": {"pp": 2, "schedule": "zb-v", "tp": 2, "sequence_parallel": True},
}


def cases() -> list[tuple[str, str, str]]:
    """Llama: every policy on one rank, over tp and with shards; three with the other plans. GPT: every policy on
    one rank, and two with some plans."""
    every = ("one", "tp2-sp", "dp2-zero3")
    llama = [(p, how) for p in PLANS for how in POLICIES if p in every or how in ("full", "layers", "cheap")]
    some = ("tp2", "zb-h1", "zb-v-tp2-sp")
    gpt = [(p, how) for p in PLANS for how in POLICIES if p == "one" or (p in some and how in ("full", "cheap"))]
    return [("llama", *case) for case in llama] + [("gpt-tied", *case) for case in gpt]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "plan", "policy"), cases())
def test_same_bits_as_without(kind: str, plan: str, policy: str) -> None:
    num_layers = len(POLICIES[policy].get("recompute_layers", ()))
    job = of_four_microbatches(kind, num_layers, **PLANS[plan], **POLICIES[policy])
    kept = of_four_microbatches(kind, num_layers, **PLANS[plan])
    assert_same_bits(run_on_mesh(job, record, job, NUM_STEPS), remembered(kept, record, NUM_STEPS))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_beside_a_forward_that_communicates(sequence_parallel: bool) -> None:
    """DualPipeV runs a forward and a backward at once. Recomputation communicates too, as part of the backward."""
    fields = {"pp": 2, "tp": 2, "schedule": "dualpipev", "sequence_parallel": sequence_parallel}
    kept, again = (small_job(batch=6, **fields, recompute=how) for how in ("none", "full"))
    assert_same_bits(run_on_mesh(again, record, again, NUM_STEPS), run_on_mesh(kept, record, kept, NUM_STEPS))


@leaves_nothing
def collectives(mesh: Mesh, job: JobSpec) -> int:
    replica = build(job, mesh)
    mesh.ledger.clear()
    train_step(replica, 0, made_up_tokens(job, 0))
    return mesh.ledger.tallies["all_reduce", "tp"].count


def test_output_products_are_not_computed_again() -> None:
    """Of a block's two sums over tp, only the one between attention and MLP is needed twice."""
    counts = [run_on_mesh(job, collectives, job)[0] for job in (small_job(tp=2), small_job(tp=2, recompute="full"))]
    job = small_job(tp=2)
    assert counts[1] - counts[0] == job.model.layers * job.num_microbatches


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"recompute_operators": ["norm"]}, "recompute_operators is for selective recomputation"),
        ({"recompute": "selective", "recompute_operators": []}, "name some of norm, qkv, attention, up, activation"),
        ({"recompute": "selective", "recompute_operators": ["qkv"]}, "add 'attention'"),
        ({"recompute": "selective", "recompute_operators": ["up", "norm"]}, "add 'activation'"),
        ({"recompute": "layers", "recompute_layers": [[]] * 3}, "says for 3 layers what they compute again"),
        ({"recompute": "layers", "recompute_layers": [["layer", "norm"], [], [], []]}, "no operators left to name"),
        ({"recompute": "layers", "recompute_layers": [[], [], ["up"], []]}, "recompute_layers[2] has 'up'"),
        ({"recompute_layers": [[]] * 4}, 'use plan.recompute = "layers"'),
        ({"recompute_every": 2}, "plan.recompute_every 2 needs something to recompute"),
        ({"recompute": "budget"}, "needs a limit"),
        ({"recompute": "full", "memory_limit_gib": 1.0}, "memory_limit_gib 1 is for"),
        ({"recompute": "selective", "recompute_operators": ["softmax"]}, "recompute_operators"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        small_job(layers=4, **fields)
    assert fault in str(caught.value)
