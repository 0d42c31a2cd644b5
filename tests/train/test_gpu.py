"""Tests for one GPU: the same job on CUDA as on the CPU, timed by events and within its memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.measure.rounding import HALF_UNIT
from shardwright.measure.verdict import Record, compare
from shardwright.parallel.comm.process_groups import MeshNeeds, make_mesh
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.build import build
from shardwright.train.data.batch_reader import BatchReader, my_share
from shardwright.train.data.samples import Samples
from shardwright.train.data.token_stream import TokenSpan
from shardwright.train.step_metrics import known_device, measure_shares, peak_memory_bytes
from shardwright.train.train_step import evaluate, train_step
from support.cases import KINDS, made_up_tokens, small_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def record_on(device: torch.device, job: JobSpec) -> Record:
    mesh = make_mesh(MeshNeeds(job.plan), 0, device, 30)
    replica = build(job, mesh)
    steps = [train_step(replica, i, made_up_tokens(job, i).to(device)) for i in range(3)]
    evaluated = evaluate(replica, made_up_tokens(job, 9).to(device))
    held = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
    return Record(steps, [(p.place, p.detach().cpu()) for p in held], evaluated)


@pytest.mark.parametrize("kind", list(KINDS))
def test_cuda_trains_to_what_the_cpu_does(kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    job = small_job(kind, microbatch_size=2)
    verdict = compare([record_on(torch.device("cuda", 0), job)], record_on(torch.device("cpu"), job))
    assert verdict.max_loss_difference < 1e-5
    assert verdict.max_grad_norm_relative_difference < 1e-5
    assert verdict.max_parameter_relative_difference < 1e-4


def test_dropout_recomputation_and_offload_on_cuda() -> None:
    """The same elements as on the CPU are dropped, and again when recomputed and fetched from the host. Bits may differ
    by the order in which attention's backward adds to the gradients of queries, and by no more."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0)

    def with_dropout(**plan: Any) -> JobSpec:
        job = small_job("llama", microbatch_size=2, **plan)
        return job.model_copy(update={"model": job.model.model_copy(update={"dropout": 0.1})})

    plain = record_on(device, with_dropout())
    verdict = compare([plain], record_on(torch.device("cpu"), with_dropout()))
    assert verdict.max_loss_difference < 1e-5
    for away in (False, True):
        job = with_dropout(recompute="full", offload_activations=away)
        verdict = compare([record_on(device, job)], plain)
        unordered = HALF_UNIT["float32"] * (job.model.sequence * job.model.layers) ** 0.5
        assert verdict.max_loss_difference < unordered
        assert verdict.max_grad_norm_relative_difference < unordered
        assert verdict.max_parameter_relative_difference < 10 * unordered  # Adam divides small gradients by little


def test_initial_weights_are_those_of_the_cpu() -> None:
    """Bit for bit: a part of a tensor of more elements than 32 bits count, in several blocks, and one dim."""
    for shape, box in (
        ((256, 4096, 7168), ((254, 256), (100, 900), (13, 7000))), ((5000, 3), ((1, 4999), (1, 3))),
        ((9000,), ((7, 9000),)),
    ):  # fmt: skip
        place = ParameterShard(shape, box, "normal", 0.006, "layers.3.weight")
        on_cuda = initial_box(place, 12, torch.device("cuda", 0))
        assert torch.equal(on_cuda.cpu(), initial_box(place, 12, torch.device("cpu")))


def test_batches_that_are_read_ahead_are_those_of_the_cpu(tmp_path: Path) -> None:
    path, job = tmp_path / "tokens.bin", small_job(batch=8)
    (np.arange(16 * 100 + 1) % 61).astype("<u2").tofile(path)
    samples = Samples([TokenSpan(path, "<u2", 0, 16 * 100 + 1)], job.model.sequence, seed=3)
    mesh = make_mesh(MeshNeeds(job.plan), 0, torch.device("cuda", 0), 30)
    with BatchReader(samples, job, mesh, 20) as batches:
        for i in range(20):
            result = batches.batch(i, 8 * i)
            assert result.is_cuda
            torch.cuda._sleep(10**7)  # the stream that computes is behind, and the copy beside it
            assert torch.equal(result, my_share(samples, 8 * i, job, mesh))


def test_shares_and_memory_are_measured() -> None:
    device = torch.device("cuda", 0)
    job = small_job()
    mesh = make_mesh(MeshNeeds(job.plan), 0, device, 30)
    replica = build(job, mesh)
    train_step(replica, 0, made_up_tokens(job, 0).to(device))
    with mesh.ledger.blocked("tp"):
        torch.cuda._sleep(10_000_000)  # device time, which the host does not feel
    assert mesh.ledger.blocked_s()["tp"] > 1e-3
    assert 0.0 < measure_shares(mesh, 1.0).compute < 1.0
    weights = sum(p.numel() * 4 for stage in replica.stages.values() for p in stage.parameters())
    assert peak_memory_bytes(device) > 4 * weights  # weights, gradients and two moments


def test_device_is_recognised_or_said_to_be_unknown() -> None:
    result = known_device(small_job(), torch.device("cuda", 0))
    name = torch.cuda.get_device_name(0)
    assert result is None or name in result.cuda_names
