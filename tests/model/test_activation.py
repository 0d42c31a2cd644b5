"""The gated activation against autograd's: same bits, half of what is kept besides its input."""

import pytest
import torch

from shardwright.measure.saved_tensors import saved_bytes
from shardwright.model.activation import activate, activate_and_keep, activate_gated


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu-tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_as_autograd(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(7, 3, 2 * 40, generator=generator).to(dtype)
    dy = torch.randn(7, 3, 40, generator=generator).to(dtype)
    results = []
    for gated in (activate_gated, lambda x, name: activate(x.chunk(2, dim=-1)[0], name) * x.chunk(2, dim=-1)[1]):
        x = fused.clone().requires_grad_()
        y = gated(x, name)
        y.backward(dy)
        results.append((y.detach(), x.grad))
    for own, reference in zip(*results, strict=True):
        assert torch.equal(own, reference)


def test_keeps_its_input_alone() -> None:
    fused = torch.randn(8, 2, 64, requires_grad=True)
    assert saved_bytes(lambda: activate_gated(fused, "silu")) == fused.numel() * 4


@pytest.mark.parametrize("name", ["relu", "relu2", "quick-gelu", "clamped-silu"])
def test_written_out(name: str) -> None:
    """Those that torch has no gated kernel of, as autograd has them from their descriptions; with values on both sides
    of what clamps."""
    generator = torch.Generator().manual_seed(0)
    fused, dy = (8 * torch.randn(9, width, generator=generator, dtype=torch.float64) for width in (80, 40))
    gate, up = (half.clone().requires_grad_() for half in fused.chunk(2, dim=-1))
    written = {
        "relu": lambda: gate.relu() * up,
        "relu2": lambda: gate.relu() ** 2 * up,
        "quick-gelu": lambda: gate * (1.702 * gate).sigmoid() * up,
        "clamped-silu": lambda: (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid(),
    }[name]()
    written.backward(dy)
    x = fused.clone().requires_grad_()
    y = activate_gated(x, name)
    y.backward(dy)
    torch.testing.assert_close(y, written)
    torch.testing.assert_close(x.grad, torch.cat((gate.grad, up.grad), dim=-1))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu-tanh", "relu", "relu2", "quick-gelu"])
def test_alone(name: str) -> None:
    """The gradient is autograd's of the activation as it is described, and one tensor is kept."""
    x, dy = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for function in (activate_and_keep, activate):
        leaf = x.clone().requires_grad_()
        y = function(leaf, name)
        y.backward(dy)
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(*results)
    leaf = x.clone().requires_grad_()
    assert saved_bytes(lambda: activate_and_keep(leaf, name)) == x.numel() * 8
