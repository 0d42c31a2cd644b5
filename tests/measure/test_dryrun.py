"""A rank without its cluster does what the rank does: its collectives and its memory, in a part of the time."""

import resource
from typing import Any

import pytest
import torch

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.measure.dryrun import dry_run
from shardwright.measure.memory_trace import MemoryTrace
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.message_sizes import message_bytes
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import leaves_nothing, run_on_mesh

# Every strategy that does not depend on values: how many rows an expert gets does.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("llama", {}),
    "zero1": ("llama", {"dp": 2, "zero": 1}),
    "zero2": ("gpt", {"dp": 2, "zero": 2, "bucket_mib": 0.01, "batch": 8}),
    "zero3": ("llama", {"dp": 2, "zero": 3, "batch": 8}),
    "hybrid": ("gpt", {"dp": 4, "zero": 3, "zero_ranks": 2, "batch": 8}),
    "offloaded": ("llama", {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True, "batch": 8}),
    "inputs away": ("llama", {"recompute": "full", "offload_activations": True}),
    "sequence": ("gpt", {"tp": 2, "sequence_parallel": True}),
    "latents": ("latent", {"tp": 2, "sequence_parallel": True}),
    "ring": ("llama", {"cp": 2}),
    "all-gather": ("llama", {"cp": 2, "cp_method": "all-gather"}),
    "ulysses": ("llama", {"cp": 2, "cp_method": "ulysses"}),
    "1f1b": ("gpt-tied", {"pp": 2, "dp": 2, "zero": 1, "batch": 8}),
    "stages inside": ("gpt-tied", {"pp": 2, "dp": 2, "zero": 1, "order": "pp-dp", "batch": 8}),
    "zb-v": ("llama", {"pp": 2, "schedule": "zb-v", "zero": 3, "dp": 2, "batch": 8}),
    "dualpipev": ("llama", {"pp": 2, "schedule": "dualpipev", "batch": 8}),
    "stages again": ("llama", {"pp": 2, "recompute": "stage", "batch": 8}),
    "int8": ("llama", {"dp": 2, "zero": 2, "compress": "int8"}),
    "powersgd": ("llama", {"dp": 2, "compress": "powersgd"}),
    "topk": ("llama", {"dp": 2, "compress": "topk"}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"dp": 2, "ep": 2}),
    "deepseek": ("deepseek", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
    "whole experts": ("deepseek", {"ep": 2, "tp": 2, "expert_tp": 1, "sequence_parallel": True}),
    "experts choose": ("expert-choice", {"dp": 2, "ep": 2}),
}
PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {"compute": "bf16"},
    "fp8": {"compute": "bf16", "float8": "rowwise"},
    "delayed": {"compute": "bf16", "float8": "delayed"},
}


@leaves_nothing
def of_a_step(mesh: Mesh, job: JobSpec) -> tuple[dict[str, dict[str, int]], RankMemory]:
    """The traffic of a rank in its second step, and its memory after it."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    for step in range(2):
        mesh.ledger.clear()
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share])
    return mesh.ledger.table(), replica.memory()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_the_collectives_and_the_state_are_those_of_a_run(name: str) -> None:
    kind, fields = PLANS[name]
    job = small_job(kind, **fields)
    for rank, (table, memory) in enumerate(run_on_mesh(job, of_a_step, job)):
        dry = dry_run(job, rank, "cpu")
        assert dry.collectives == dry.account_collectives == table
        assert dry.num_steps == 1
        for of in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
            assert getattr(dry.peak, of) == getattr(memory, of) == getattr(dry.account, of)
        # Inputs of layers that are away are on the host too, which the account of the state leaves out.
        assert dry.peak.host_bytes == memory.host_bytes or job.plan.offload_activations


def peak_bytes(mesh: Mesh, job: JobSpec) -> int:
    """Most memory in a rank's second step, of tensors with values."""
    with MemoryTrace() as trace:
        replica = build(job, mesh)
        for step in range(2):
            tokens = made_up_tokens(job, step)
            trace.add([tokens])
            trace.begin()
            train_step(replica, step, tokens)
    return trace.peak_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["one", "sequence", "latents", "1f1b", "stages again"])
def test_the_peak_is_that_of_a_run(name: str) -> None:
    kind, fields = PLANS[name]
    job = small_job(kind, **fields | {"dp": 1, "zero": 0})
    for rank, measured in enumerate(run_on_mesh(job, peak_bytes, job)):
        missing = measured - dry_run(job, rank, "cpu").peak.total_bytes
        # Adam counts its steps; and in a pipeline messages that left stay until the others have taken them.
        waiting = job.num_microbatches * message_bytes(job) if job.plan.pp > 1 else 0
        assert 0 <= missing <= waiting + 64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [*PLANS, *EXPERTS])
def test_every_strategy_runs_dry(name: str, device: str) -> None:
    kind, fields = {**PLANS, **EXPERTS}[name]
    job = small_job(kind, **fields)
    run = dry_run(job, job.plan.world - 1, device)
    assert run.peak.activations_bytes > 0 and run.peak.working_bytes >= 0
    assert max(num_bytes for _, num_bytes in run.curve) == run.peak.total_bytes
    assert run.collectives == run.account_collectives


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_versions_of_weights_are_parameters(schedule: str) -> None:
    """A schedule that never drains runs dry until it is full, with the versions that it keeps."""
    job = small_job("llama", pp=2, schedule=schedule, batch=8)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_grad_norm": 0.0})})
    run = dry_run(job, 0, "cpu")
    # One more than the account has may be shown still, though no microbatch needs it any more.
    version_bytes = run.peak.gradients_bytes
    assert run.peak.parameters_bytes - run.account.parameters_bytes in (0, version_bytes)
    assert run.peak.optimizer_bytes == run.account.optimizer_bytes
    assert run.num_steps == 2 and run.collectives == run.account_collectives


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_runs_dry(name: str, device: str) -> None:
    fields = small_job("llama", tp=2).model_dump()
    run = dry_run(make_job(fields | {"precision": PRECISIONS[name]}), 0, device)
    assert run.peak.total_bytes > 0


def test_a_rank_of_405_billion_parameters() -> None:
    job = load_job("llama3-405b-16k", [])
    peak_before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # other tests of this process
    run = dry_run(job, job.plan.world - 1, "cuda")
    assert run.peak.parameters_bytes == run.account.parameters_bytes
    assert run.peak.total_bytes == pytest.approx(run.account.total_bytes, rel=0.1)
    assert run.collectives == run.account_collectives
    assert run.host_peak_bytes < max(4 * 2**30, peak_before_bytes + 1)


def test_rows_that_cross_to_nodes_are_as_many_as_choices() -> None:
    """Node-aware, what arrives in a node and goes on inside of it has a row for each choice there, not for all."""
    fields = small_job("deepseek", dp=4, ep=4).model_dump()
    fields["cluster"] = {"devices_per_node": 2, "nodes": 2}
    fields["plan"]["dispatch"] = "node-aware"
    (direct, aware) = (dry_run(make_job(of), 0, "cpu") for of in (fields | {"plan": {"dp": 4, "ep": 4}}, fields))
    assert aware.collectives == aware.account_collectives
    assert aware.peak.activations_bytes == pytest.approx(direct.peak.activations_bytes, rel=0.2)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="rank 2 is asked for, and the plan has"):
        dry_run(small_job(dp=2), 2, "cpu")


def test_memory_is_followed_until_nobody_holds_it() -> None:
    with MemoryTrace() as trace:
        x = torch.zeros(1024)
        y = x[10:].view(-1) + 1
        assert trace.now_bytes == 4096 + 4056
        del x
        assert trace.now_bytes == 4056
        del y
        assert (trace.now_bytes, trace.peak_bytes) == (0, 8152)
