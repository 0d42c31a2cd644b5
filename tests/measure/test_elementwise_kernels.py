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
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.layers.chains import chains
from shardwright.layers.query import PlanGrid
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


def test_scores_of_2019() -> None:
    """Megatron-LM's GPT of September 2019: a quotient, a product with the mask of a sequence, a difference, a softmax
    and dropout; the mask of a sequence counts for all of its heads."""
    scores, mask = half(32, HEADS, TOKENS, TOKENS), torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.half, device="meta")

    def weights(scores: Tensor) -> Tensor:
        masked = scores / 8.0 * mask - 10000.0 * (1.0 - mask)
        return torch.native_dropout(masked.softmax(dim=-1), 0.1, train=True)[0]

    counted = traffic_of(weights, scores.half().detach().requires_grad_(), elements=scores.numel())
    assert counted == pytest.approx(software_of("megatron-2019").softmax_bytes, rel=0.01)


def test_dropout_before_a_sum() -> None:
    """Of single operators it reads 2 bytes, writes 2 and a mask; fused with the sum it writes the mask alone."""
    counted = traffic_of(
        lambda stream, x: stream + torch.native_dropout(x, 0.1, train=True)[0],
        half(TOKENS, WIDTH),
        half(TOKENS, WIDTH),
        elements=TOKENS * WIDTH,
    )
    shape = ModelShape(4, WIDTH, HEADS, HEADS, WIDTH // HEADS, 4 * WIDTH, False, 51200, TOKENS)
    single, fused = (
        next(o for o in chains(shape, PlanGrid(), software_of(name))["dense"] if o.name == "mlp join")
        for name in ("megatron-2019", "megatron-2021")
    )
    assert single.forward_bytes == counted[0] * TOKENS * WIDTH
    assert fused.forward_bytes == (counted[0] - 4) * TOKENS * WIDTH
    gradients = 6  # of both that read the stream are added up
    assert single.backward_bytes == fused.backward_bytes == (counted[1] + gradients) * TOKENS * WIDTH


def kernels_of_last_bias(num_experts: int) -> list[int]:
    """Kernels, forward and backward, of a bias that is added expert by expert with the weights of choices."""
    rows = half(num_experts * TOKENS, WIDTH)
    weights, biases = half(len(rows), 1), [half(WIDTH) for _ in range(num_experts)]

    def added(x: Tensor, of_choices: Tensor, *each: Tensor) -> Tensor:
        parts = zip(x.split(TOKENS), each, of_choices.split(TOKENS), strict=True)
        return torch.cat([part + bias * weight for part, bias, weight in parts])

    with KernelTraffic() as forward:
        result = added(rows, weights, *biases)
    with KernelTraffic() as backward:
        torch.autograd.grad(result, (rows, weights, *biases), torch.empty_like(result))
    return [sum(passed.kernels.values()) for passed in (forward, backward)]


def test_biases_of_experts() -> None:
    """Beside the last bias, the first has a sum, and each of both is added to what other microbatches made."""
    few, many = kernels_of_last_bias(4), kernels_of_last_bias(8)
    forward, backward = ((more - less) / 4 for more, less in zip(many, few, strict=True))
    assert (forward, backward + 3) == software_of("megatron-core").expert_bias_kernels
