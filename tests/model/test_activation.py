"""The gated activation against autograd's: same bits, half of what is kept besides its input."""

import pytest
import torch

from shardwright.measure.saved_tensors import saved_bytes
from shardwright.model.activation import activate, activate_gated


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
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_keeps_its_input_alone() -> None:
    fused = torch.randn(8, 2, 64, requires_grad=True)
    assert saved_bytes(lambda: activate_gated(fused, "silu")) == fused.numel() * 4
