"""Traffic and logits of software under torch.autocast against torch itself, on a CPU.

Operators are taken for kernels that read their arguments and write their results once (support/kernel_traffic.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shardwright.config.elementwise_kernels import ELEMENTWISE_KERNELS
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.layers.chains import chains
from shardwright.layers.query import PlanGrid
from support.kernel_traffic import KernelTraffic

SEQUENCES, TOKENS, HIDDEN, HEADS = 2, 64, 64, 4
GPT = ModelShape(
    1, HIDDEN, HEADS, HEADS, HIDDEN // HEADS, 4 * HIDDEN, False, 512, TOKENS, learned_positions=True, layer_norm=True,
    bias=True,
)  # fmt: skip
_PRODUCTS = ("mm", "addmm", "bmm")


class Block(nn.Module):
    """A layer of GPT-2 as karpathy/nanoGPT has it: one product for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.weights = nn.Parameter(torch.ones(2, HIDDEN))

    def forward(self, x_BTH: Tensor) -> Tensor:
        normed_BTH = layer_norm(x_BTH, (HIDDEN,), self.weights[0])
        parts = self.qkv(normed_BTH).split(HIDDEN, dim=2)
        queries, keys, values = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
        x_BTH = x_BTH + self.out(mixed.reshape(x_BTH.shape))
        return x_BTH + self.down(gelu(self.up(layer_norm(x_BTH, (HIDDEN,), self.weights[1]))))


def by_operator(traffic: KernelTraffic) -> Counter[str]:
    """Bytes by element of the residual stream, of each of torch's operators."""
    total: Counter[str] = Counter()
    for kernel, count in traffic.kernels.items():
        total[kernel.operator] += count * kernel.num_bytes / (SEQUENCES * TOKENS * HIDDEN)
    return total


def counted() -> list[float]:
    """Bytes that a block's forward and its backward move beside products and attention, by element of the stream."""
    block, x_BTH = Block(), torch.randn(SEQUENCES, TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), KernelTraffic() as in_forward:
        y_BTH = block(x_BTH)
    with KernelTraffic() as in_backward:
        y_BTH.backward(torch.empty_like(y_BTH))
    sums = []
    for traffic in (in_forward, in_backward):
        operators = by_operator(traffic)
        left_out = {name for name in operators if name in _PRODUCTS or "attention" in name or name.startswith("select")}
        sums.append(sum(size for name, size in operators.items() if name not in left_out))
    return sums


def predicted(software: str) -> list[float]:
    """The same of the catalog's description."""
    chain = chains(GPT, PlanGrid(microbatch=SEQUENCES), software_of(software))["dense"]
    elements = SEQUENCES * TOKENS * HIDDEN
    passes = [(float(o.forward_bytes), float(o.backward_bytes)) for o in chain if o.name != "attention"]
    return [sum(sizes) / elements for sizes in zip(*passes, strict=True)]


def test_a_block_moves_what_plain_torch_moves_under_autocast() -> None:
    """Torch's CPU kernels of norms read gradient and input once, not twice as CUDA's two kernels do."""
    assert predicted("torch") == pytest.approx(counted(), rel=0.04)


def test_autocast_is_more_than_a_tenth_of_what_the_same_layers_move_without() -> None:
    for software in ("fsdp-2024", "fsdp-compile", "transformers-2024"):
        plain, cast = predicted(software), predicted(f"{software}+autocast")
        assert all(more > 1.1 * less for more, less in zip(cast, plain, strict=True)), software


def test_weights_are_cast_in_each_pass() -> None:
    software = software_of("torch")
    spared = software.model_copy(update={"autocast": False})
    moved, without = (chains(GPT, PlanGrid(), s)["dense"] for s in (software, spared))
    weights = sum(p.inner * p.columns for o in moved for p in o.products if p.weight)
    for name in ("forward_bytes", "backward_bytes"):
        more = sum(getattr(a, name) - getattr(b, name) for a, b in zip(moved, without, strict=True))
        assert more == pytest.approx(6 * weights)


def test_norms_and_turns_of_llama_under_autocast() -> None:
    kernels = ELEMENTWISE_KERNELS["torch-autocast"]
    stream = torch.randn(1, 256, 512, requires_grad=True)
    norm = LlamaRMSNorm(512)
    with KernelTraffic() as in_forward:
        y = norm(stream)
    gradient = torch.randn_like(y)
    with KernelTraffic() as in_backward:
        torch.autograd.grad(y, (stream, norm.weight), gradient)
    assert kernels.norm and bytes_by(stream, in_forward, in_backward) == pytest.approx(kernels.norm.rms, rel=0.01)

    queries, keys = (torch.randn(1, 8, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    tables = [torch.randn(1, 256, 64) for _ in range(2)]
    with KernelTraffic() as in_forward:
        turned = [part.bfloat16() for part in apply_rotary_pos_emb(queries, keys, *tables)]
    gradients = [torch.randn_like(part) for part in turned]
    with KernelTraffic() as in_backward:
        torch.autograd.grad(turned, (queries, keys), gradients)
    halves = [number / 2 for number in bytes_by(queries, in_forward, in_backward)]
    assert kernels.rotary and halves == pytest.approx(kernels.rotary.turned, rel=0.05)


def bytes_by(tensor: Tensor, *passes: KernelTraffic) -> list[float]:
    """Bytes of passes by element of a tensor."""
    return [sum(count * kernel.num_bytes for kernel, count in p.kernels.items()) / tensor.numel() for p in passes]


def test_a_compiled_model_that_returns_its_logits_adds_zeros_to_their_gradient() -> None:
    """AOTAutograd gives the backward a gradient of each result, of zeros where nothing asks for one."""
    # As torch's guide to backends of one's own has them.
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    gradients: list[str] = []

    def compile_backward(graph: torch.fx.GraphModule, arguments: list[Tensor]) -> Callable[..., object]:
        gradients.extend(node.name for node in graph.graph.nodes if "tangents" in node.name)
        return make_boxed_func(graph.forward)

    def compile_forward(graph: torch.fx.GraphModule, arguments: list[Tensor]) -> Callable[..., object]:
        return make_boxed_func(graph.forward)

    def loss_and_logits(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(x)
        return logits, cross_entropy(logits.float(), targets)

    head = nn.Linear(8, 16)
    compiled = torch.compile(
        loss_and_logits, backend=aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    )
    _, loss = compiled(torch.randn(4, 8), torch.randint(0, 16, (4,)))
    loss.backward()
    assert len(gradients) == 2
    returned, inside = (ELEMENTWISE_KERNELS[name].loss for name in ("compiled-returned", "compiled"))
    assert returned and inside and returned[1] - inside[1] == 2 + 2  # zeros are written, and read


def test_shared_inputs_are_cast_once_where_layers_are_compiled() -> None:
    gated = replace(GPT, gated=True)
    kept = [
        sum(float(o.kept) for o in chains(gated, PlanGrid(), software_of(name))["dense"] if o.name.endswith("enter"))
        for name in ("torch", "torch-compile")
    ]
    assert kept[0] == pytest.approx(2.5 * kept[1])  # five products of two inputs
