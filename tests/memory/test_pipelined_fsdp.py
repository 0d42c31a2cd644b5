"""FSDP 2 in a pipeline, tensor parallel by torch's plans, and layers of single operators: KempnerForge."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.layers.chains import chains, kept_bytes, share_run_again
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.rank_estimate import Memory, rank_memory

SHAPE = ModelShape(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=704, gated=True, vocab=1000, sequence=64)
TOKENS = 2 * SHAPE.sequence
LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated=True, vocab=128256, sequence=4096
)


class Norm(nn.Module):
    """RMSNorm whose weight meets its input in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normal * self.weight).to(x.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """A layer of Llama in the single operators of KempnerForge's model."""

    def __init__(self) -> None:
        super().__init__()
        width, keys = SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.qkv = nn.ModuleList([nn.Linear(width, columns, bias=False) for columns in (width, keys, keys)])
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, SHAPE.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(SHAPE.ffn, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normal = self.norms[0](x)
        q, k, v = (m(normal).view(*x.shape[:2], -1, SHAPE.head_dim).transpose(1, 2) for m in self.qkv)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(SHAPE.heads // SHAPE.kv_heads, dim=1) for t in (k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(*x.shape))
        normal = self.norms[1](x)
        return x + self.down(silu(self.gate(normal)) * self.up(normal))


def test_a_layer_keeps_what_autograd_saves() -> None:
    """To the byte but for what the account leaves out: the two factors of norms, 4 bytes a token each, and attention's
    result once more, whose heads are joined by a copy."""
    block = Block().to(torch.bfloat16)
    angles = torch.zeros(SHAPE.sequence, SHAPE.head_dim // 2, dtype=torch.bfloat16)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), angles)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            saved[place] = tensor
        return tensor

    x = torch.randn(2, SHAPE.sequence, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, angles, angles)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    chain = chains(SHAPE, PlanGrid(microbatch=2, precision="bf16"), software_of("kempnerforge"))["dense"]
    assert kept_bytes(chain, "none") == num_bytes - (2 * 4 + 2 * SHAPE.hidden) * TOKENS


def first_stage(software: str, **plan: object) -> Memory:
    grid = PlanGrid(
        tp=4, pp=2, dp=4, zero=3, global_batch=32, recompute="full", precision="bf16", moment_bytes=2, has_masters=False
    )
    run = Run(
        LLAMA,
        replace(grid, **plan),
        device="h200",
        software=software,
        devices_per_node=4,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    return rank_memory(run, shipped())[0]


def test_in_a_pipeline_fsdp_keeps_whole_parameters_and_gradients() -> None:
    """torch.distributed.pipelining frees neither until the last backward; the shards are there as well."""
    memory = first_stage("kempnerforge")
    matrices = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336) + 2 * 4096
    elements = 16 * matrices / 4 + 128256 * 4096  # tp ranks share layers, and each has the whole embedding
    assert float(memory.parameters) == pytest.approx(2 * elements * (1 + 1 / 4), rel=1e-3)
    assert float(memory.gradients) == pytest.approx(4 * elements, rel=1e-3)
    alone = first_stage("kempnerforge", pp=1, tp=8)
    assert float(alone.parameters) < 2 * 8.1e9 / 8
    assert float(first_stage("fsdp-2024").parameters) < 0.25 * float(memory.parameters)


def test_who_keeps_whole_stages() -> None:
    whole, parts = ("kempnerforge", "torchtitan", "torchtitan-2026", "automodel"), ("fsdp-2024", "deepspeed-2025")
    assert [software_of(name).zero.whole_in_pipeline for name in whole + parts] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("shares_sequence", [False, True])
def test_products_that_enter_apart_have_exchanges_of_their_own(shares_sequence: bool) -> None:
    apart = software_of("kempnerforge")
    together = apart.model_copy(update={"enters_apart": False})
    grid = PlanGrid(tp=4, sequence_parallel=shares_sequence, precision="bf16")

    def sent_bytes(software: object, direction: str) -> float:
        chain = chains(LLAMA, grid, software)["dense"]  # type: ignore[arg-type]
        exchanges = [exchange for operator in chain for exchange in getattr(operator, direction)]
        return sum(float(exchange.size) for exchange in exchanges if exchange.axis == "tp")

    stream = 2 * LLAMA.sequence * LLAMA.hidden
    # Query, key and value, gate and up: five sums of gradients where two are, and under sequence parallel five gathers.
    assert sent_bytes(apart, "backward") - sent_bytes(together, "backward") == 3 * stream
    assert sent_bytes(apart, "forward") - sent_bytes(together, "forward") == 3 * stream * shares_sequence
    kept = [kept_bytes(chains(LLAMA, grid, software)["dense"], "none") for software in (apart, together)]
    assert kept[0] - kept[1] == 3 * stream * shares_sequence


def test_where_no_product_is_kept_attention_alone_is() -> None:
    """A layer's input and what attention gave; all products are computed again."""
    chain = chains(LLAMA, PlanGrid(precision="bf16"), software_of("torchtitan-2026"))["dense"]
    stream = 2 * LLAMA.sequence * LLAMA.hidden
    sums = 4 * LLAMA.sequence * LLAMA.heads
    assert kept_bytes(chain, "kernel") == 2 * stream + sums
    again = {operator.name: share_run_again(operator, "kernel") for operator in chain}
    assert again["attention"] == 0.0 and set(again.values()) == {0.0, 1.0}
    assert all(share == 1.0 for name, share in again.items() if name != "attention")
