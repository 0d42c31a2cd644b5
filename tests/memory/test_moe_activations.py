"""Bytes that a layer with experts keeps, measured and as memory/moe_activations.py says: equal, for given rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.precision import PrecisionSpec
from shardwright.measure.saved_tensors import saved_bytes
from shardwright.memory.activations import layer_of
from shardwright.memory.kept_tensors import IN_ROUTING, Rows
from shardwright.memory.moe_activations import expected_rows
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.expert import dispatch as expert
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build
from support.cases import EXPERT_BLOCKS, EXPERTS, small_job
from support.ranks import run_on_mesh

LAYER = 1  # has experts in all kinds
# Rows of experts that choose are given by what happens, and so are those of a gate that takes choices back.
KINDS = [kind for kind in (*EXPERTS, *EXPERT_BLOCKS) if kind != "expert-choice"]


def kept(mesh: Mesh, job: JobSpec) -> tuple[int, int, Rows]:
    """Bytes that autograd keeps of a layer, bytes of the trip beside it, and rows."""
    stage = build(job, mesh).stages[0]
    torch.manual_seed(mesh.rank // job.plan.tp)
    x = stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()
    run = stage.forward_pass(Microbatch(1, 0, 0))
    trips: list[expert.DispatchPlan] = []
    plan_dispatch = expert.plan_dispatch

    def noted(*args: Any) -> expert.DispatchPlan:
        trips.append(plan_dispatch(*args))
        return trips[-1]

    buffers = [buffer for state in stage.routers().values() for buffer in state.buffers()]
    constants: list[Tensor] = [p.detach() for p in placed_parameters(stage).values()] + stage.tables.tensors
    expert.plan_dispatch = noted
    try:
        total = saved_bytes(lambda: stage.layers[str(LAYER)](x, run), constants + buffers)
    finally:
        expert.plan_dispatch = plan_dispatch
    (trip,) = trips
    indices = [t for t in (trip.choice_R, trip.row_TK, trip.arriving_N) if t is not None]
    rows = Rows(sum(trip.num_sent), sum(trip.num_received), trip.row_TK.shape[1])
    return total, sum(t.untyped_storage().nbytes() for t in indices), rows


def check(job: JobSpec, policy: frozenset[str]) -> None:
    for total, trip_bytes, rows in run_on_mesh(job, kept, job):
        predicted = layer_of(job, LAYER, rows).kept(policy)
        assert predicted.pop(IN_ROUTING.trip, trip_bytes) == trip_bytes  # with the whole layer it is made again
        assert total == sum(predicted.values())


@pytest.mark.parametrize("policy", [[], ["activation"], ["norm", "attention", "up", "activation"], ["layer"]])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_rank(kind: str, policy: list[str]) -> None:
    how: dict[str, Any] = {"recompute": "selective", "recompute_operators": policy}
    if policy in ([], ["layer"]):
        how = {"recompute": "full" if policy else "none"}
    check(small_job(kind, microbatch_size=2, **how), frozenset(policy))


@pytest.mark.parametrize("kind", ["qwen-moe", "deepseek", "gshard"])
def test_in_bf16(kind: str) -> None:
    job = small_job(kind, microbatch_size=2)
    check(job.model_copy(update={"precision": PrecisionSpec(compute="bf16")}), frozenset())


@pytest.mark.parametrize("policy", [[], ["activation"], ["norm", "attention", "up", "activation"]])
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "delayed"])
@pytest.mark.parametrize("kind", ["qwen-moe", "deepseek", "llama4-moe"])
def test_in_fp8(kind: str, recipe: Any, policy: list[str]) -> None:
    how: dict[str, Any] = {"recompute": "selective", "recompute_operators": policy} if policy else {}
    job = small_job(kind, microbatch_size=2, **how)
    precision = PrecisionSpec(compute="bf16", float8=recipe, float8_weight_gradients=True)
    check(job.model_copy(update={"precision": precision}), frozenset(policy))


PLANS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "ep2-in-sp2": {"tp": 2, "sequence_parallel": True, "ep": 2, "expert_tp": 1},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["qwen-moe", "deepseek", "switch", *EXPERT_BLOCKS])
def test_on_two_ranks(kind: str, plan: str) -> None:
    check(small_job(kind, microbatch_size=2, **PLANS[plan]), frozenset())


def test_expected_rows() -> None:
    """Each token's choices, whatever ep is, unless there is less room."""
    assert expected_rows(small_job("mixtral", microbatch_size=2)) == Rows(64, 64, 2)
    assert expected_rows(small_job("mixtral", microbatch_size=2, dp=2, ep=2)) == Rows(64, 64, 2)
    sharded = small_job("mixtral", microbatch_size=2, tp=2, sequence_parallel=True, ep=2, expert_tp=1)
    assert expected_rows(sharded) == Rows(32, 32, 2)
    job = small_job("mixtral", microbatch_size=2)
    moe = job.model.moe.model_copy(update={"capacity_factor": 0.5})
    tight = job.model_copy(update={"model": job.model.model_copy(update={"moe": moe})})
    assert expected_rows(tight) == Rows(32, 32, 2)
