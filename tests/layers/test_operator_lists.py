"""The list of a layer's operators that is costed, against what the runtime does: FLOPs and collectives, counted.

`layers/chains.py` says what a layer computes and exchanges, and what share of it a policy does again. Here layers
run on real ranks, forward and backward, and each of their products and collectives is noted.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwright.config.job import JobSpec
from shardwright.config.plan import layer_policies
from shardwright.layers.recompute_cost import Again
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.expert import dispatch as expert
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.train.build import build
from support.cases import small_job
from support.ranks import run_on_mesh

Sent = Counter[tuple[str, str]]  # bytes by kind and axis

# Of the collectives of a router itself (choices, their weights, counts) no cost model speaks: fewer bytes by token.
ROUTER_BYTES = 32
SEQUENCE = {"tp": 2, "sequence_parallel": True}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("gpt", {}),
    "tp": ("llama", {"tp": 2}),
    "sequence parallel": ("gpt", {"tp": 4, "sequence_parallel": True}),
    "ring": ("llama", {"cp": 4}),
    "all-gather": ("llama", {"tp": 2, "cp": 2, "cp_method": "all-gather"}),
    "ulysses": ("llama", {"cp": 2, "cp_method": "ulysses"}),
    "norms of all heads": ("olmo", {"tp": 2}),
    "latents, tp": ("latent", {"tp": 2}),
    "latents, sequence parallel": ("latent", SEQUENCE),
    "latents, ring": ("latent", {"cp": 2}),
    "latents, all-gather": ("latent-plain-queries", {"cp": 2, "cp_method": "all-gather"}),
    "latents and plain queries": ("latent-plain-queries", SEQUENCE),
    "norms after, tp": ("after", {"tp": 2}),
    "norms after, sequence parallel": ("after", SEQUENCE),
    "one norm, tp": ("one-norm", {"tp": 2}),
    "one norm, sequence parallel": ("one-norm", SEQUENCE),
    "two norms, tp": ("two-norms", {"tp": 2}),
    "two norms, sequence parallel": ("two-norms", SEQUENCE),
}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("deepseek", {}),
    "ep": ("mixtral", {"dp": 2, "ep": 2}),
    "cut": ("deepseek", {"tp": 2}),
    "cut, sequence parallel": ("mixtral", {"dp": 2, "ep": 2} | SEQUENCE),
    "whole, sequence parallel": ("deepseek", {"ep": 2, "expert_tp": 1} | SEQUENCE),
    "weighed input": ("llama4-moe", {"dp": 2, "ep": 2} | SEQUENCE),
}
AGAIN = {
    "a layer": ("llama", ["layer"]),
    "a layer of experts": ("deepseek", ["layer"]),
    "qkv": ("gpt", ["qkv", "attention"]),
    "up": ("llama", ["norm", "up", "activation"]),
    "latents": ("latent", ["qkv", "attention"]),
    "heads": ("latent", ["attention"]),
    "plain queries": ("latent-plain-queries", ["qkv", "attention"]),
    "experts": ("deepseek", ["norm", "up", "activation"]),
    "a layer with norms after": ("after", ["layer"]),
    "a layer with one norm": ("one-norm", ["layer"]),
    "one norm": ("one-norm", ["norm", "qkv", "attention", "activation"]),
    "two norms": ("two-norms", ["norm", "up", "activation"]),
    "weighed input": ("llama4-moe", ["up", "activation"]),
}


class Flops(TorchDispatchMode):
    """Adds up the FLOPs of matrix products. (FlopCounterMode follows modules, and stumbles over regions run again.)"""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def run_layer(mesh: Mesh, job: JobSpec, number: int) -> tuple[Sent, int]:
    """One microbatch through a layer and back: what it sent, and FLOPs of its products."""
    stage = build(job, mesh).stages[0]
    torch.manual_seed(mesh.rank // job.plan.tp)
    x = stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()
    run = stage.forward_pass(Microbatch(1, 0, 0))
    sent, rows, widths = Sent(), [], []
    plan_dispatch, start = expert.plan_dispatch, expert.start_all_to_all_v

    def noted(_: Ledger, kind: str, axis: str, num_bytes: int, __: Any) -> None:
        if kind == "all_to_all_v":  # of which the ledger has what goes to others
            if widths[-1] > 1:  # the list leaves the weights of choices out
                sent["all_to_all", axis] += rows[-1] * job.model.hidden * x.element_size()
        elif num_bytes >= ROUTER_BYTES * job.tokens_within * job.plan.microbatch_size:
            sent["ring" if kind == "exchange" else kind, axis] += num_bytes

    def noted_plan(*args: Any) -> expert.DispatchPlan:
        trip = plan_dispatch(*args)
        rows.append(sum(trip.num_sent))
        return trip

    def noted_start(out: Any, *args: Any, **named: Any) -> Any:
        widths.append(out.shape[1])
        return start(out, *args, **named)

    with pytest.MonkeyPatch.context() as patch, Flops() as flops:
        patch.setattr(Ledger, "record", noted)
        patch.setattr(expert, "plan_dispatch", noted_plan)
        patch.setattr(expert, "start_all_to_all_v", noted_start)
        stage.layers[str(number)](x, run).sum().backward()
    return sent, flops.total


def costed(job: JobSpec, number: int) -> tuple[Sent, float]:
    """The same as the list has it. Kernels of attention are not among the products that are counted."""
    layer = Again.of(job, number)
    again = {operator.name: share for operator, share in layer.operators(layer_policies(job.plan, number + 1)[number])}
    sent, flops = Sent(), 0.0
    for operator in layer.chain:
        share = again.get(operator.name, 0)
        for times, exchanges in ((1 + share, operator.forward), (1, operator.backward)):
            for e in exchanges:  # around a ring a rank passes on what the others have
                part = (job.plan.cp - 1) / job.plan.cp if e.kind == "ring" else 1
                sent[e.kind, e.axis] += int(times * e.size * part)
        flops += (3 + share) * sum(p.flops for p in operator.products if p.weight)
    if job.model.moe.has_experts(number):  # the router's account of which experts are chosen together
        tokens = job.tokens_within * job.plan.microbatch_size / (job.plan.tp if job.plan.sequence_parallel else 1)
        flops += 2 * tokens * job.model.moe.experts**2
    return +sent, flops


def check(job: JobSpec, number: int) -> None:
    sent, flops = costed(job, number)
    counted = run_on_mesh(job, run_layer, job, number)
    assert [of for of, _ in counted] == [sent] * job.plan.world
    assert sum(of for _, of in counted) == job.plan.world * flops


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "plan"), DENSE.values(), ids=DENSE)
def test_a_dense_layer(kind: str, plan: dict[str, Any]) -> None:
    check(small_job(kind, microbatch_size=2, **plan), 0)


def expert_job(kind: str, **plan: Any) -> JobSpec:
    """Without losses for balance, whose own small products nobody costs."""
    job = small_job(kind, microbatch_size=2, **plan)
    moe = job.model.moe.model_copy(update={"aux_loss": "none", "z_coefficient": 0.0})
    return job.model_copy(update={"model": job.model.model_copy(update={"moe": moe})})


@pytest.mark.parametrize(("kind", "plan"), OF_EXPERTS.values(), ids=OF_EXPERTS)
def test_a_layer_of_experts(kind: str, plan: dict[str, Any]) -> None:
    """One with shared experts and latent attention, one without; rows are as many as the gate has chosen."""
    check(expert_job(kind, **plan), 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "names"), AGAIN.values(), ids=AGAIN)
def test_what_is_computed_again(kind: str, names: list[str]) -> None:
    """A product that is computed again under sequence parallel has its input gathered again."""
    check(expert_job(kind, recompute="layers", recompute_layers=[names] * 4, **SEQUENCE), 1)
