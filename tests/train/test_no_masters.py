"""An update without master weights: torch's on weights in bf16, bit for bit, on one rank and on several."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers import elementwise
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.zero.master_weights import Masters, ShardPiece
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import run_on_mesh

BF16 = torch.bfloat16
SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
NARROW = {"compute": "bf16", "master": "none", "gradients": "compute", "moments": "bf16"}


def made(size: int) -> tuple[Tensor, list[Tensor]]:
    """A weight, and gradients of some steps."""
    drawn = torch.Generator().manual_seed(size)
    gradients = [torch.randn(size, generator=drawn).to(BF16) for _ in range(5)]
    return torch.randn(size, generator=drawn).to(BF16), gradients


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_all_in_bf16_is_torchs_fused_kernel(name: str, kind: Any) -> None:
    start, gradients = made(200)
    own, reference = start.clone(), start.clone()
    result = make_optimizer(SPEC.model_copy(update={"name": name}), [own], [], BF16)
    other = kind([reference], lr=1e-2, betas=(SPEC.beta1, SPEC.beta2), eps=SPEC.epsilon, weight_decay=0.1, fused=True)
    for gradient in gradients:
        own.grad, reference.grad = gradient.clone(), gradient.clone()
        result.step()
        other.step()
        assert torch.equal(own, reference)
    assert not torch.equal(own, start)
    assert all(result.state[own][moment].dtype == BF16 for moment in result.names)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("moments", [BF16, torch.float32])
def test_any_mixture_is_float32s_step_rounded(
    moments: torch.dtype, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that do not divide the tensor; a place where fused kernels fuse otherwise is one of bf16."""
    monkeypatch.setitem(elementwise.BLOCKS, "cpu", 64)
    spec = SPEC.model_copy(update={"name": optimizer})
    weight, gradients = made(200)
    own = make_optimizer(spec, [weight], [], moments)
    for gradient in gradients:
        exact = weight.float()
        other = make_optimizer(spec, [exact], [], torch.float32)
        if own.num_steps:
            other.go_on_after(own.num_steps)
            for name in own.names:
                other.moment(exact, name).copy_(own.moment(weight, name))
        weight.grad, exact.grad = gradient.clone(), gradient.float()
        own.step()
        other.step()
        assert weight.dtype == BF16
        torch.testing.assert_close(weight, exact.to(BF16), rtol=2.0**-7, atol=0.0)
        assert (weight != exact.to(BF16)).float().mean() < 0.01
        for name in own.names:
            wanted = other.moment(exact, name).to(moments)
            torch.testing.assert_close(own.moment(weight, name), wanted, rtol=2.0**-7, atol=1e-12)


def job_of(plan: dict[str, Any] | None = None, **precision: str) -> JobSpec:
    return make_job(small_job(**(plan or {})).model_dump() | {"precision": NARROW | precision})


def losses_and_weights(mesh: Mesh, job: JobSpec) -> tuple[list[float], list[Tensor]]:
    """Of some steps, on one rank."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    losses = [
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share]).loss for step in range(4)
    ]
    return losses, [unit.value_shard.clone() for stage in replica.shards.values() for unit in stage.units]


def test_a_run_on_one_rank_is_plain_torchs() -> None:
    """Torch's AdamW over the same parameters and summed gradients, clipped as torch clips: every weight, bit for
    bit."""
    job = job_of()
    replica = build(job, job_mesh(job, 0, torch.device("cpu")))
    (stage,) = replica.shards.values()
    settings = {"betas": (job.optimizer.beta1, job.optimizer.beta2), "eps": job.optimizer.epsilon, "fused": True}
    pairs: list[tuple[Any, list[Tensor], Any]] = []
    for unit in stage.units:
        copies = [tensor.clone() for tensor in unit.masters.tensors]
        assert all(copy.dtype == BF16 for copy in copies) and unit.summed_gradients().dtype == BF16
        groups = [
            {"params": [copy], "weight_decay": job.optimizer.weight_decay if piece.decays else 0.0}
            for copy, piece in zip(copies, unit.masters._pieces, strict=True)
        ]
        pairs.append((unit, copies, torch.optim.AdamW(groups, **settings)))
    for step in range(4):
        result = train_step(replica, step, made_up_tokens(job, step))
        for unit, copies, plain in pairs:
            for copy, piece in zip(copies, unit.masters._pieces, strict=True):
                copy.grad = unit.summed_gradients()[piece.start : piece.stop].clone()  # clipped already
            for group in plain.param_groups:
                group["lr"] = result.learning_rate
            plain.step()
            for copy, tensor in zip(copies, unit.masters.tensors, strict=True):
                assert torch.equal(copy, tensor)


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does(name: str) -> None:
    """To what bf16 rounds: a place of a weight is 0.4 %, and so are those of gradients."""
    one, _ = losses_and_weights(job_mesh(job_of(), 0, torch.device("cpu")), job_of())
    job = job_of(PLANS[name])
    for losses, shards in run_on_mesh(job, losses_and_weights, job):
        assert all(shard.dtype == BF16 for shard in shards)
        assert losses == pytest.approx(one, rel=2.0**-7)


def test_what_needs_masters_is_refused() -> None:
    for fields, words in (
        ({"precision": NARROW | {"gradients": "float32"}}, "precision.gradients 'float32' is for"),
        ({"precision": NARROW | {"compute": "fp16"}}, "smallest numbers of fp16"),
        ({"optimizer": {"name": "muon"}}, "updates whole matrices of float32 master weights"),
        ({"plan": {"offload_optimizer": 0.5}}, "plan.offload_optimizer is for the float32 master weights"),
        ({"plan": {"zero": 3, "offload_parameters": True}}, "plan.offload_parameters is for"),
    ):
        with pytest.raises(PlanError, match=words):
            make_job({"precision": NARROW} | fields)
    make_job({"precision": {"master": "none"}, "optimizer": {"name": "muon"}})  # float32 has no masters anyway


def test_a_state_holds_weights_as_they_are_and_takes_up_either() -> None:
    """A checkpoint of float32 weights is rounded, one of bf16 widened."""
    taken = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for number, saved in ((BF16, torch.float32), (torch.float32, BF16), (BF16, BF16)):
        values = torch.zeros(100, dtype=BF16)
        masters = Masters([ShardPiece(0, 100, True, on_host=False)], values, torch.device("cpu"), number=number)
        masters.make_optimizer(partial(make_optimizer, SPEC, moments=BF16))
        masters.copy_in("weights", 0, taken.to(saved))
        assert torch.equal(masters.copy_out("weights", 10, 90), taken.to(saved).to(number)[10:90])
        masters.write_values(values)
        assert torch.equal(values, taken.to(BF16))
        assert (masters.tensors[0].data_ptr() == values.data_ptr()) == (number == BF16)
