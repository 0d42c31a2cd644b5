"""AdamW with moments in bf16: float32's arithmetic, moments rounded after each step, no float32 copy of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.base import PlanError
from shardwright.config.checks.check_precision import MOST_BETA
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.optimizers import elementwise
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.zero.master_weights import Masters, ShardPiece
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job

SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
BF16 = torch.bfloat16
MOMENTS = ("exp_avg", "exp_avg_sq")


def made(size: int) -> tuple[Tensor, list[Tensor]]:
    """A weight, and gradients of some steps, of sizes as in training and of 0."""
    drawn = torch.Generator().manual_seed(size)
    sizes = 10 ** torch.empty(size).uniform_(-12, 2, generator=drawn)
    gradients = [torch.randn(size, generator=drawn) * sizes for _ in range(6)]
    gradients[3][: size // 2] = 0.0
    return torch.randn(size, generator=drawn), gradients


@pytest.mark.parametrize("size", [1, 33, 64, 200])
def test_it_is_torchs_adamw_with_moments_rounded_after_each_step(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in blocks that do not divide the tensor."""
    monkeypatch.setitem(elementwise.BLOCKS, "cpu", 64)
    start, gradients = made(size)
    own, reference = start.clone(), start.clone()
    result = make_optimizer(SPEC, [own], [], BF16)
    other = torch.optim.AdamW(
        [reference], lr=1e-2, betas=(SPEC.beta1, SPEC.beta2), eps=SPEC.epsilon, weight_decay=0.1, fused=True
    )
    for gradient in gradients:
        own.grad, reference.grad = gradient, gradient
        result.step()
        other.step()
        for name in MOMENTS:
            wide, kept = other.state[reference][name], result.state[own][name]
            assert kept.dtype == BF16
            wide.copy_(wide.to(BF16))
            assert torch.equal(kept.float(), wide)
        assert torch.equal(own, reference)
    assert not torch.equal(own, start)


def plain_steps(weight: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas of Loshchilov and Hutter 2019 (arXiv 1711.05101, algorithm 2), element by element."""
    first, second = torch.zeros_like(weight, dtype=BF16), torch.zeros_like(weight, dtype=BF16)
    for step, gradient in enumerate(gradients, 1):
        m = SPEC.beta1 * first.float() + (1 - SPEC.beta1) * gradient
        v = SPEC.beta2 * second.float() + (1 - SPEC.beta2) * gradient**2
        weight = weight - SPEC.learning_rate * SPEC.weight_decay * weight
        root = (v / (1 - SPEC.beta2**step)).sqrt() + SPEC.epsilon
        weight = weight - SPEC.learning_rate * m / (1 - SPEC.beta1**step) / root
        first, second = m.to(BF16), v.to(BF16)
    return weight, first, second


def test_the_update_is_that_of_moments_before_they_are_rounded() -> None:
    """After one step a rounded first moment would be visible: the weight moves by the sign of the gradient alone."""
    start, gradients = made(300)
    for number in (1, 6):
        weight = start.clone()
        optimizer = make_optimizer(SPEC, [weight], [], BF16)
        for gradient in gradients[:number]:
            weight.grad = gradient
            optimizer.step()
        wanted, first, second = plain_steps(start, gradients[:number])
        torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-6)
        # Roundings of float32 may bring an element over the middle between two numbers of bf16: one place.
        for name, moment in zip(MOMENTS, (first, second), strict=True):
            torch.testing.assert_close(optimizer.state[weight][name], moment, rtol=2.0**-7, atol=0.0)
    rounded = start * (1 - SPEC.learning_rate * SPEC.weight_decay)
    m, v = (0.1 * gradients[0]).to(BF16).float(), (0.05 * gradients[0] ** 2).to(BF16).float()
    rounded -= SPEC.learning_rate * (m / 0.1) / ((v / 0.05).sqrt() + SPEC.epsilon)
    assert (rounded - plain_steps(start, gradients[:1])[0]).abs().max() > 1e-5


class _Largest(TorchDispatchMode):
    """The most elements of a float32 tensor that an operator made, other than `there`."""

    def __init__(self, there: Sequence[Tensor]) -> None:
        super().__init__()
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self._there:
                self.elements = max(self.elements, storage.nbytes() // 4)
        return result


def test_no_float32_copy_of_a_moment_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(elementwise.BLOCKS, "cpu", 1000)
    weight, gradient = torch.zeros(20_000), torch.ones(20_000)
    optimizer = make_optimizer(SPEC, [weight], [], BF16)
    for _ in range(2):
        weight.grad = gradient
        with _Largest([weight, gradient]) as largest:
            optimizer.step()
        assert largest.elements == 2000  # a block of both
    assert sum(t.nbytes for t in optimizer.state[weight].values()) == 2 * 2 * 20_000 + 4


def test_masters_keep_and_give_moments_as_they_are() -> None:
    """Of which some are on the host; a checkpoint of float32 moments is rounded, one of bf16 widened."""
    pieces = [ShardPiece(0, 40, True, on_host=True), ShardPiece(40, 100, False, on_host=False)]
    taken = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for kept, saved in ((BF16, torch.float32), (torch.float32, BF16), (BF16, BF16)):
        masters = Masters(pieces, torch.zeros(100, dtype=BF16), torch.device("cpu"))
        masters.make_optimizer(partial(make_optimizer, SPEC, moments=kept))
        values = taken.to(saved)
        for name in MOMENTS:
            masters.copy_in(name, 0, values)
        masters.set_num_steps(3)
        assert masters.num_steps() == 3 and masters.state_names() == ["weights", *MOMENTS]
        for name in MOMENTS:
            assert torch.equal(masters.copy_out(name, 10, 90), values.to(kept)[10:90])
        assert masters.copy_out("weights", 0, 100).dtype == torch.float32
        masters.step(torch.ones(100), 1.0, 1e-3)
        on_device, on_host = (sum(t.nbytes for t in masters.memory(where)) for where in (False, True))
        assert on_device == 60 * (4 + 2 * kept.itemsize)
        assert on_host == 40 * (4 + 4 + 2 * kept.itemsize)


def falls(beta: float) -> list[bool]:
    """True for each of the numbers from 1 to 2 that falls where there is no gradient."""
    numbers = (1 + torch.arange(128) / 128).to(BF16)
    return ((beta * numbers.float()).to(BF16) < numbers).tolist()


def test_the_largest_decay_is_the_largest_with_which_every_moment_falls() -> None:
    assert all(falls(MOST_BETA - 1e-6))
    assert falls(MOST_BETA + 1e-6) == [True, False, *[True] * 126]
    assert not any(falls(0.999))
    weight = torch.zeros(128)
    optimizer = make_optimizer(OptimizerSpec(beta2=0.999), [], [weight], BF16)
    weight.grad = torch.linspace(1, 2, 128)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    weight.grad = torch.zeros(128)
    for _ in range(10):
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"], before)  # which ten steps should take 1 % off


def job_of(moments: str, **optimizer: float) -> JobSpec:
    return make_job({"precision": {"moments": moments}, "optimizer": optimizer})


def test_decays_that_rounding_loses_are_refused() -> None:
    job_of("float32", beta2=0.999)
    job_of("bf16", beta1=0.0, beta2=0.996)
    with pytest.raises(PlanError) as raised:
        job_of("bf16", beta1=0.997, beta2=0.999)
    first, second = raised.value.faults
    assert "optimizer.beta1 0.997 takes 0.003 of a moment off" in first and "1/258 = 0.0039" in first
    assert "optimizer.beta2 0.999 takes 0.001" in second
    assert 'optimizer.beta2 = 0.996 or smaller, or precision.moments = "float32"' in second


def losses_of(moments: str) -> list[float]:
    """Of a small model that learns four batches by heart."""
    fields = small_job().model_dump() | {"precision": {"moments": moments}}
    job = make_job(fields | {"optimizer": {"learning_rate": 3e-3, "steps": 100}})
    mesh = job_mesh(job, 0, torch.device("cpu"))
    replica = build(job, mesh)
    batches = [made_up_tokens(job, number) for number in range(4)]
    return [train_step(replica, step, batches[step % 4]).loss for step in range(100)]


def test_losses_are_those_of_float32_moments() -> None:
    """Over a hundred steps, to a hundredth of what is learned meanwhile."""
    exact, results = losses_of("float32"), losses_of("bf16")
    learned = exact[0] - exact[-1]
    assert learned > 1 and results != exact
    worst = max(abs(a - b) for a, b in zip(results, exact, strict=True))
    assert worst < learned / 100
