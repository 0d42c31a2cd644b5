"""Traffic of torch's elementwise kernels in the catalog against what its operators read and write in transformers.

Operators run without values. An operator is taken for one kernel that reads its arguments and writes its results once.
The catalog leaves out tensors of a number a token and tables of positions: 5 % of the numbers here at most.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shardwright.config.elementwise_kernels import ELEMENTWISE_KERNELS
from support.kernel_traffic import KernelTraffic

TOKENS, WIDTH, HEADS = 256, 512, 8
TORCH, HALF_LOSS, JOINED = (ELEMENTWISE_KERNELS[name] for name in ("torch", "torch-half", "torch-joined"))
RESULT = 2  # bytes of the element that leaves an activation, which is counted apart


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def traffic_of(forward: Callable[..., Tensor], *inputs: Tensor, elements: int) -> list[float]:
    """Bytes by element that a forward moves, and its backward."""
    with KernelTraffic() as in_forward:
        result = forward(*inputs)
    with KernelTraffic() as in_backward:
        torch.autograd.grad(result, inputs, torch.empty_like(result))
    passes = in_forward.kernels, in_backward.kernels
    return [sum(count * kernel.num_bytes for kernel, count in kernels.items()) / elements for kernels in passes]


def test_norm() -> None:
    norm, stream = LlamaRMSNorm(WIDTH).to("meta", torch.bfloat16), half(1, TOKENS, WIDTH)
    counted = traffic_of(lambda x, _: norm(x), stream, norm.weight, elements=stream.numel())
    assert TORCH.norm and counted == pytest.approx(TORCH.norm.rms, rel=0.01)


def test_gates() -> None:
    """Of two products, and of the halves of one, whose gradients autograd joins."""
    elements = TOKENS * WIDTH
    apart = traffic_of(lambda gate, up: silu(gate) * up, half(TOKENS, WIDTH), half(TOKENS, WIDTH), elements=elements)
    assert TORCH.activation and [number - RESULT for number in apart] == pytest.approx(TORCH.activation.gated)

    def joined_gate(both: Tensor) -> Tensor:
        gate, up = both.split(WIDTH, dim=-1)
        return silu(gate) * up

    joined = traffic_of(joined_gate, half(TOKENS, 2 * WIDTH), elements=elements)
    assert JOINED.activation and [number - RESULT for number in joined] == pytest.approx(JOINED.activation.gated)


def test_turn() -> None:
    queries, keys = half(1, HEADS, TOKENS, WIDTH // HEADS), half(1, HEADS, TOKENS, WIDTH // HEADS)
    tables = [half(1, TOKENS, WIDTH // HEADS).detach() for _ in range(2)]
    counted = traffic_of(
        lambda q, k: torch.stack(apply_rotary_pos_emb(q, k, *tables)), queries, keys, elements=2 * queries.numel()
    )
    forward = counted[0] - 4  # the stack of both results
    assert TORCH.rotary and [forward, counted[1]] == pytest.approx(TORCH.rotary.turned, rel=0.05)


def test_loss() -> None:
    """The schema of `nll_loss` has all logs as an argument, of which it reads one a token."""
    targets = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    wide, narrow = (
        traffic_of(loss, half(TOKENS, WIDTH), elements=TOKENS * WIDTH)
        for loss in (lambda x: cross_entropy(x.float(), targets), lambda x: cross_entropy(x, targets))
    )
    assert [number - 4 for number in wide] == pytest.approx(TORCH.loss, rel=0.01)
    assert [number - 2 for number in narrow] == pytest.approx(HALF_LOSS.loss, rel=0.01)
