"""Our tensor-parallel decoder block against the same block of torch.nn modules under DTensor's parallelize_module.

    .venv/bin/python benchmarks/tensor_parallel.py

Forward and backward of one Llama-like block on tp 2, without and with sequence parallel. The baseline is the usual
one: separate projections with ColwiseParallel and RowwiseParallel, SequenceParallel on the norms, and a
PrepareModuleInput before each group of projections, so that they share one collective as ours do. Outputs, input
gradients and weight gradients are checked equal before anything is timed.
"""

import torch
from alternate import RATIO_HEADER, alternate, check_close, plain_stage, print_row, resized, run_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.measure.saved_tensors import saved_bytes
from shardwright.model.rotary import rotary_angles
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build

BATCH = 2
SIZES = {
    "small": {"layers": 1, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "sequence": 128, "vocab": 2},
    "larger": {"layers": 1, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "sequence": 512, "vocab": 2},
}
MOST_ROUNDS, MOST_S = 60, 16.0


def rotate(x_SBND: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair by its angle."""
    first, second = x_SBND.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class TorchAttention(nn.Module):
    """Attention in the layout of our own, [S, B, H], with a projection each for query, key and value."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.query = nn.Linear(spec.hidden, spec.heads * spec.head_size, bias=False)
        self.key = nn.Linear(spec.hidden, spec.num_kv_heads * spec.head_size, bias=False)
        self.value = nn.Linear(spec.hidden, spec.num_kv_heads * spec.head_size, bias=False)
        self.out = nn.Linear(spec.heads * spec.head_size, spec.hidden, bias=False)
        self.is_grouped = spec.heads != spec.num_kv_heads
        angles = rotary_angles(torch.arange(spec.sequence), spec.head_size, spec.rotary_base)
        self.angles = tuple(angle.squeeze(2) for angle in angles)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] to [S, B, H]."""
        S, B, _ = x_SBH.shape
        q, k, v = (p(x_SBH).view(S, B, -1, self.head_dim) for p in (self.query, self.key, self.value))
        q, k = rotate(q, *self.angles), rotate(k, *self.angles)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.out(out.permute(2, 0, 1, 3).reshape(S, B, -1))


class TorchMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.ffn_size, bias=False)
        self.up = nn.Linear(spec.hidden, spec.ffn_size, bias=False)
        self.down = nn.Linear(spec.ffn_size, spec.hidden, bias=False)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] to [S, B, H]."""
        return self.down(functional.silu(self.gate(x_SBH)) * self.up(x_SBH))


class TorchBlock(nn.Module):
    """The pre-norm block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_epsilon)
        self.attention = TorchAttention(spec)
        self.mlp_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_epsilon)
        self.mlp = TorchMLP(spec)

    def forward(self, x_sBH: Tensor) -> Tensor:
        """[s, B, H] to [s, B, H]."""
        x_sBH = x_sBH + self.attention(self.attention_norm(x_sBH))
        return x_sBH + self.mlp(self.mlp_norm(x_sBH))


def torch_block(spec: ModelSpec, weights: dict[str, Tensor], devices: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The baseline with the same weights, parallelized."""
    block = TorchBlock(spec)
    block.load_state_dict(weights)
    between = Shard(0) if sequence_parallel else Replicate()
    styles = {
        "attention": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        norms = {name: SequenceParallel(sequence_dim=0) for name in ("attention_norm", "mlp_norm")}
        styles |= norms
    return parallelize_module(block, devices, styles)


def by_torch_names(spec: ModelSpec, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors (weights or gradients, of one rank or of all) under the names and shapes of the baseline."""
    query, key, value = ours["attention.qkv.weight"].split((spec.heads // spec.num_kv_heads, 1, 1), dim=1)
    gate, up = ours["mlp.up.weight"]
    return {
        "attention_norm.weight": ours["attention_norm.weight"],
        "attention.query.weight": query.flatten(0, 2),
        "attention.key.weight": key.flatten(0, 2),
        "attention.value.weight": value.flatten(0, 2),
        "attention.out.weight": ours["attention.out.weight"],
        "mlp_norm.weight": ours["mlp_norm.weight"],
        "mlp.gate.weight": gate,
        "mlp.up.weight": up,
        "mlp.down.weight": ours["mlp.down.weight"],
    }


def compare(mesh: Mesh, job: JobSpec) -> list[str]:
    """Check, measure and time one variant; the row of the table after its name."""
    spec, sequence_parallel = job.model, job.plan.sequence_parallel
    replica = build(job, mesh)
    own, shards = replica.stages[0].layers["0"], replica.shards[0]
    whole = placed_parameters(plain_stage(job).layers["0"])
    weights = by_torch_names(spec, {name: p.detach() for name, p in whole.items()})
    reference = torch_block(spec, weights, DeviceMesh("cpu", list(mesh.tp.ranks)), sequence_parallel)

    generator = torch.Generator().manual_seed(job.run.seed)
    x_SBH, dy_SBH = torch.randn(2, spec.sequence, BATCH, spec.hidden, generator=generator)
    if sequence_parallel:
        x_SBH, dy_SBH = (t.chunk(mesh.tp.size)[mesh.tp.index].clone() for t in (x_SBH, dy_SBH))
    inputs = {block: x_SBH.clone().requires_grad_() for block in (own, reference)}

    def our_forward() -> Tensor:
        return own(inputs[own], replica.stages[0].forward_pass())

    def their_forward() -> Tensor:
        return reference(inputs[reference])

    def our_pass() -> Tensor:
        shards.clear_gradients()
        inputs[own].grad = None
        y = our_forward()
        y.backward(dy_SBH)
        shards.arm(is_last=True, is_split=False)
        shards.reduce()  # gradients of norms, of which each rank has seen a part of the tokens
        shards.wait()
        return y

    def their_pass() -> Tensor:
        reference.zero_grad()
        inputs[reference].grad = None
        y = their_forward()
        y.backward(dy_SBH)
        for norm in (reference.attention_norm, reference.mlp_norm):
            if isinstance(norm.weight.grad, DTensor) and norm.weight.grad.placements[0].is_partial():
                norm.weight.grad = norm.weight.grad.redistribute(placements=[Replicate()])
        return y

    check_close("the output", our_pass().detach(), their_pass().detach())
    check_close("the input gradient", inputs[own].grad, inputs[reference].grad)
    gradients = by_torch_names(spec, {name: p.gradient for name, p in placed_parameters(own).items()})
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        check_close(f"the gradient of {name}", gradients[name], gradient)
    saved = [
        saved_bytes(forward, block.parameters()) for forward, block in ((our_forward, own), (their_forward, reference))
    ]
    ratio = alternate(our_pass, their_pass, MOST_ROUNDS, MOST_S)
    return [*ratio.cells(), f"{saved[0] / 2**20:.2f}", f"{saved[1] / 2**20:.2f}"]


def benchmark(mesh: Mesh, job: JobSpec) -> None:
    """All variants on this rank."""
    print_row(["forward and backward", *RATIO_HEADER, "ours saved, MiB", "DTensor saved, MiB"], is_header=True)
    for size, model in SIZES.items():
        for sequence_parallel in (False, True):
            variant = resized(job, model=model, plan={"sequence_parallel": sequence_parallel})
            name = f"{size}, tp 2" + (" with sequence parallel" if sequence_parallel else "")
            print_row([name, *compare(mesh, variant)])


if __name__ == "__main__":
    run_two_ranks(benchmark, {"plan": {"tp": 2}})
