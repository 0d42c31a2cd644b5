"""An expert's activation times the weight of a choice: gradients are autograd's, and only what goes in is kept."""

import pytest
import torch
from torch import Tensor

from shardwright.measure.saved_tensors import saved_bytes
from shardwright.model.activation import activate, activate_gated
from shardwright.model.weighed_activation import weighed_activation

N, F = 9, 40


def made_up(gated: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    up, dy = (torch.randn(N, width, generator=generator).to(dtype) for width in (F * (1 + gated), F))
    return up, torch.rand(N, 1, generator=generator), dy


def by_autograd(up: Tensor, weight: Tensor, dy: Tensor, name: str, gated: bool) -> tuple[Tensor, ...]:
    up, weight = up.double().requires_grad_(), weight.double().requires_grad_()
    y = weight * (activate_gated(up, name) if gated else activate(up, name))
    y.backward(dy.double())
    return y.detach(), up.grad, weight.grad


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_autograds(gated: bool, name: str, dtype: torch.dtype) -> None:
    """A few roundings of the dtype each; those of the weight's gradient are of its terms."""
    up, weight, dy = made_up(gated, dtype)
    x, w = up.clone().requires_grad_(), weight.clone().requires_grad_()
    y = weighed_activation(x, w, name, gated)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (dtype, dtype, torch.float32)
    expected, dx, dw = by_autograd(up, weight, dy, name, gated)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.detach().double(), expected, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(x.grad.double(), dx, rtol=8 * eps, atol=8 * eps)
    terms = (expected / weight * dy).abs().sum(1, keepdim=True)
    assert ((w.grad - dw).abs() <= 4 * eps * terms).all()


def test_keeps_what_goes_in_alone() -> None:
    up, weight = (x.requires_grad_() for x in made_up(True, torch.float32)[:2])
    assert saved_bytes(lambda: weighed_activation(up, weight, "silu", True)) == up.nbytes + weight.nbytes
