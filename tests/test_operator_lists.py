"""Two lists of a layer's operators say the same of what both say: FLOPs and bytes of collectives, operator by operator.

`workload/activations.py` has what our runtime keeps, for memory budgets; `workload/layers.py` what any software moves,
for time. A product that is in one alone, or has other sizes there, would make the budget choose by wrong prices.
"""

from collections import Counter

import pytest

from shardwright.cost.calibration import software_of
from shardwright.spec import catalog
from shardwright.spec.job import JobSpec
from shardwright.spec.load import make_job
from shardwright.workload.activations import layer_of
from shardwright.workload.layers import chains
from shardwright.workload.shape import run_of

# What the runtime's operators are in the list of the cost model. Of norms, activations and gates one list says no
# FLOPs, for memory bounds them.
PARTS = {
    "attention enter": "qkv", "qkv": "qkv", "heads": "attention", "rotary": "attention", "attention": "attention",
    "out": "output", "attention leave": "output", "mlp enter": "up", "up": "up", "down": "down", "mlp leave": "down",
}  # fmt: skip
DENSE = ("gpt2", "llama3-8b", "qwen2.5-7b", "tiny-llama")
PLANS = {
    "one rank": {},
    "tp": {"tp": 2},
    "sequence parallel": {"tp": 4, "sequence_parallel": True},
    "ring": {"tp": 2, "cp": 4},
    "all-gather": {"cp": 2, "cp_method": "all-gather"},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
}


def job_of(model: str, plan: dict[str, object]) -> JobSpec:
    return make_job({
        "model": catalog.read("models", model) | {"name": model}, "plan": {"microbatch_size": 2} | plan,
        "cluster": {"device": "h100-sxm"}, "precision": {"compute": "bf16"},
    })  # fmt: skip


def of_runtime(job: JobSpec, layer: int) -> tuple[Counter[str], Counter[str]]:
    """FLOPs and bytes by operator of the list that the runtime's memory is derived from."""
    flops, sent = Counter[str](), Counter[str]()
    for chain in layer_of(job, layer).chains:
        for operator in chain:
            if operator.name in PARTS.values():
                flops[operator.name] += int(operator.work.flops)
                sent[operator.name] += int(operator.work.communicated_bytes)
    return flops, sent


def of_costs(job: JobSpec, kind: str) -> tuple[Counter[str], Counter[str]]:
    """The same of the list that is costed. Scores are not discounted for causality in the other one."""
    run = run_of(job)
    flops, sent = Counter[str](), Counter[str]()
    for operator in chains(run.shape, run.cut, software_of("megatron-2022"))[kind]:
        part = PARTS.get(operator.name)
        if part is None:
            continue
        flops[part] += int(operator.flops)
        for exchange in operator.forward:
            # The ledger counts what a rank passes on around a ring, the cost model what goes round.
            passed_on = (run.cut.cp - 1) / run.cut.cp if exchange.kind == "ring" else 1
            sent[part] += int(exchange.size * passed_on)
    return flops, sent


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model", DENSE)
def test_a_dense_layer(model: str, plan: dict[str, object]) -> None:
    job = job_of(model, plan)
    assert of_runtime(job, 0) == of_costs(job, "dense")


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "ep": 2}, {"cp": 2, "cp_method": "all-gather"}])
@pytest.mark.parametrize("model", ["tiny-mixtral", "tiny-qwen-moe", "tiny-switch", "qwen3-30b-a3b"])
def test_a_layer_of_experts(model: str, plan: dict[str, object]) -> None:
    """As many rows as on average, whatever ranks hold the experts; shared experts beside them."""
    job = job_of(model, plan)
    assert of_runtime(job, job.model.layers - 1) == of_costs(job, "experts")


@pytest.mark.parametrize("model", ["tiny-deepseek", "deepseek-v3"])
@pytest.mark.parametrize("plan", [{}, {"tp": 2}])
def test_latent_attention(model: str, plan: dict[str, object]) -> None:
    """Of the norms of latents one list says no FLOPs: a thousandth of attention's, or less in a large model."""
    job = job_of(model, plan)
    (flops, sent), (costed, exchanged) = of_runtime(job, 0), of_costs(job, "dense")
    assert sent == exchanged
    assert {part: costed[part] / count for part, count in flops.items()} == pytest.approx(
        dict.fromkeys(flops, 1.0), rel=0.01
    )
    assert costed["qkv"] == flops["qkv"] and costed["down"] == flops["down"]
