"""Inputs of recomputed layers in host memory: same bits, and every byte that leaves comes back."""

from typing import Any

import pytest
import torch

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.layers.layer_tensors import BLOCK
from shardwright.measure.saved_tensors import LiveBytes, saved_bytes
from shardwright.memory.activation_peak import activation_bytes
from shardwright.memory.activations import layer_of
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.recompute.offload import Convoy, HostPool
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program
from shardwright.train.build import build
from shardwright.train.train_step import evaluate, train_step
from support.cases import made_up_tokens, record, small_job
from support.ranks import run_on_mesh

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "dualpipev": {"pp": 2, "schedule": "dualpipev"},
    "zero3": {"dp": 2, "zero": 3},
    "every-other": {"recompute_every": 2},
}


def offloaded(**fields: Any) -> JobSpec:
    return small_job(recompute="full", offload_activations=True, **fields)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits_as_without(plan: str) -> None:
    kept, away = (small_job(recompute="full", offload_activations=flag, **PLANS[plan]) for flag in (False, True))
    for own, other in zip(run_on_mesh(away, record, away, 3), run_on_mesh(kept, record, kept, 3), strict=True):
        assert own.steps == other.steps
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own.boxes, other.boxes, strict=True))


def account(mesh: Mesh, job: JobSpec) -> tuple[int, int, int, int]:
    """Bytes out, in, left behind and at most at once, of one step and an evaluation on this rank."""
    replica = build(job, mesh)
    tokens = made_up_tokens(job, 0)
    train_step(replica, 0, tokens)
    evaluate(replica, tokens)
    host = next(iter(replica.stages.values())).host
    assert host is not None
    return host.bytes_out, host.bytes_in, host.held_bytes, host.peak_bytes


def test_account_of_a_pipeline() -> None:
    """The second stage's first input is held by the pipeline, so it stays. Rank 0 of 1F1B has two microbatches away."""
    job = offloaded(pp=2, layers=6, batch=4)
    one = layer_of(job).sizes[BLOCK.input]
    accounts = run_on_mesh(job, account, job)
    assert accounts == [(4 * 3 * one, 4 * 3 * one, 0, 2 * 3 * one), (4 * 2 * one, 4 * 2 * one, 0, 2 * one)]


def saved(mesh: Mesh, job: JobSpec) -> tuple[int, int]:
    """The bytes that the layers of a stage keep on the device, and the most that is alive in a step."""
    replica = build(job, mesh)
    stage = replica.stages[0]
    constants = [p.detach() for p in placed_parameters(stage).values()] + stage.tables.tensors
    x = stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()
    run = stage.forward_pass(Microbatch(1, 0, 0))

    def forward() -> torch.Tensor:
        y = x
        for layer in stage.layers.values():
            y = layer(y, run)
        return y

    kept = saved_bytes(forward, constants)
    tokens = made_up_tokens(job, 0)
    with LiveBytes([*constants, tokens]) as live:
        train_step(replica, 0, tokens)
    return kept, live.peak_bytes


def test_device_keeps_nothing_between_forward_and_backward() -> None:
    away, kept = (small_job(recompute="full", offload_activations=flag, layers=12, batch=2) for flag in (True, False))
    (saved_away, peak_away), (saved_kept, peak_kept) = (run_on_mesh(job, saved, job)[0] for job in (away, kept))
    one = layer_of(away).sizes[BLOCK.input]
    assert (saved_away, saved_kept) == (0, 12 * one)
    assert peak_away < peak_kept
    predicted, _ = activation_bytes(away, job_program(away), 0)
    assert 0.7 * predicted <= peak_away <= predicted  # what a region gives its product is held besides


def test_next_one_is_called_while_one_is_here() -> None:
    pool = HostPool(torch.device("cpu"))
    convoy = Convoy(pool)
    sent = [torch.full((5,), float(i)) for i in range(4)]
    numbers = [convoy.send(x) for x in sent]
    assert (pool.bytes_out, pool.bytes_in, pool.held_bytes) == (80, 0, 80)
    for number in reversed(numbers):
        assert torch.equal(convoy.bring(number), sent[number])
        assert pool.bytes_in == min(80, 20 * (4 - number + 1))  # this one and the one before it
    assert pool.held_bytes == 0
    again = Convoy(pool)
    again.send(sent[0])
    assert len([b for buffers in pool._free.values() for b in buffers]) == 3  # buffers are used again


def test_needs_full_recomputation() -> None:
    with pytest.raises(PlanError, match=r'offload_activations .* plan.recompute = "full"'):
        small_job(offload_activations=True)
