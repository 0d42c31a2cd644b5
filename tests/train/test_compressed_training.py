"""Compressed gradients in training: every stage of ZeRO sums what the compressors make of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.parameter_shard import Box
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, my_tokens, record, remembered, small_job
from support.ranks import run_on_mesh

METHODS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {},
    "int8": {},
    "powersgd": {"compress_rank": 4},
    "topk": {"compress_share": 0.1},
}


def compressed(method: str, **plan: Any) -> JobSpec:
    return small_job(batch=4, dp=2, compress=method, compress_least=256, **METHODS[method], **plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_follows_uncompressed(method: str, zero: int) -> None:
    plain, job = small_job(batch=4, dp=2), compressed(method, zero=zero)
    expected, ranks = remembered(plain, record, 6)[0], run_on_mesh(job, record, job, 6)
    assert [rank.steps for rank in ranks] == [ranks[0].steps] * 2
    assert ranks[0].steps[0].loss == expected.steps[0].loss
    assert ranks[0].steps != expected.steps
    assert ranks[0].steps[-1].loss == pytest.approx(expected.steps[-1].loss, rel=0.02)


@pytest.mark.parametrize("method", ["int8", "powersgd", "topk"])
def test_errors_follow_the_scale_of_the_loss(method: str) -> None:
    """A scale is a power of two, by which each product and each error is multiplied exactly: one that doubles after
    each step trains what a constant one trains. Errors in the units of the last step would be half of what they are.
    """
    runs = []
    for growth_steps in (0, 1):
        fields = compressed(method).model_dump()
        fields["precision"] = {"compute": "fp16", "loss_scale": 256.0, "loss_scale_growth_steps": growth_steps}
        job = make_job(fields)
        runs.append(run_on_mesh(job, record, job, 6)[0].steps)
    constant, growing = runs
    assert [step.loss_scale for step in growing] == [256.0 * 2**number for number in range(6)]
    assert [step.loss for step in growing] == pytest.approx([step.loss for step in constant], rel=1e-4)


def bytes_over_dp(mesh: Mesh, job: JobSpec) -> int:
    """The bytes that cross dp in a step, twice for an all-reduce, which is a scatter and a gather."""
    replica = build(job, mesh)
    mesh.ledger.clear()
    train_step(replica, 0, made_up_tokens(job, 0)[: job.batch.global_batch_size // 2])
    return sum(
        t.num_bytes * (2 if kind == "all_reduce" else 1)
        for (kind, axis), t in mesh.ledger.tallies.items()
        if axis == "dp"
    )


def test_compressed_gradients_are_fewer_bytes() -> None:
    plain = small_job(batch=4, dp=2)
    whole = run_on_mesh(plain, bytes_over_dp, plain)[0]
    moved = {
        method: run_on_mesh(job, bytes_over_dp, job)[0] / whole for method in METHODS for job in [compressed(method)]
    }
    assert moved["bf16"] == pytest.approx(0.5, abs=0.02)
    assert moved["fp16"] == moved["bf16"]
    assert moved["int8"] < 0.3
    assert moved["powersgd"] < 0.6
    assert moved["topk"] < 0.6


def everything_held(mesh: Mesh, job: JobSpec) -> list[tuple[str, Box, Tensor]]:
    """Name, box and values of each parameter after some steps."""
    replica = build(job, mesh)
    for step in range(3):
        train_step(replica, step, my_tokens(mesh, job, step))
    with replica.gathered():
        held = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        return [(p.place.name, p.place.box, p.detach().clone()) for p in held]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "zero": 2, "sequence_parallel": True}, {"pp": 2, "zero": 3}])
@pytest.mark.parametrize("method", METHODS)
def test_what_ranks_hold_alike_stays_alike(method: str, plan: dict[str, Any]) -> None:
    """Norms and positions over tp, a tied table over pp: their buckets hold other tensors on other ranks."""
    job = small_job("gpt-tied", dp=2, compress=method, compress_least=1, **METHODS[method], **plan)
    first: dict[tuple[str, Box], Tensor] = {}
    for held in run_on_mesh(job, everything_held, job):
        for name, box, values in held:
            assert torch.equal(first.setdefault((name, box), values), values), name
