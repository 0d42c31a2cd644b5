"""AdamW is torch's, bit for bit, and does not load the compiler that torch's loads."""

import sys

import pytest
import torch

from cases import record, small_job
from ranks import run_on_mesh
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.elementwise import make_optimizer


def test_same_bits_as_torch() -> None:
    spec = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
    start = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    ours, theirs = ([torch.nn.Parameter(row.clone()) for row in start] for _ in range(2))
    mine = make_optimizer(spec, ours[:1], ours[1:])
    other = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=1e-2, betas=(spec.beta1, spec.beta2), eps=spec.epsilon, fused=True,
    )  # fmt: skip
    for step in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad, right.grad = (torch.full((9,), 1.0 + step) * start[0] for _ in range(2))
        mine.step()
        other.step()
    for left, right, before in zip(ours, theirs, start, strict=True):
        assert torch.equal(left, right)
        assert not torch.equal(left, before)


def loads_compiler(mesh: Mesh, job: JobSpec) -> bool:
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        del sys.modules[name]  # the tests' fork server has it
    vars(torch).pop("_dynamo", None)
    record(mesh, job, 1)
    return "torch._dynamo" in sys.modules


@pytest.mark.parametrize("moments", ["float32", "bf16"])
def test_a_step_does_not_load_the_compiler(moments: str) -> None:
    job = make_job(small_job(dp=2, zero=1, batch=2).model_dump() | {"precision": {"moments": moments}})
    assert run_on_mesh(job, loads_compiler, job) == [False, False]
