"""Part kernels of gpu.py: what one device reaches in the kernels of a layer, beside its peak and the prediction.

Shapes are of a layer of the dense 1B model and of Llama 3 8B, with the tokens of a microbatch. Work is what must be
done: FLOPs of products and of the visible half of the scores, bytes of what comes in and goes out once. The peak is
that of the device's entry in the catalog, predicted is what the cost model says of this runtime (cost/kernels.py with
catalog/software/shardwright.toml).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_bench import Bench, Case, Row, time_s
from gpu_jobs import job_of, operator_prices, rates
from torch import Tensor
from torch.nn import functional

from shardwright.config.elementwise_kernels import loss_traffic
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.cost.calibration import device_of
from shardwright.cost.kernels import product_s
from shardwright.model.activation import activate_gated
from shardwright.model.loss import HeadWeights, Targets, microbatch_loss
from shardwright.model.norm import rms_norm, rms_norm_backward
from shardwright.model.rotary import rotary_angles, split_and_rotate
from shardwright.parallel.comm.process_groups import StandIns
from shardwright.parallel.comm.transport import DryTransport
from shardwright.parallel.context.block_attention import dry_attention
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.tensor.gradient_sums import add_product
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.master_weights import Masters, ShardPiece
from shardwright.precision.float8 import E4M3, Granularity, quantise
from shardwright.precision.float8_linear import forward_product, input_gradient, make_float8_state
from shardwright.precision.scaled_mm import has_scaled_product, scaled_product
from shardwright.sharding.block_sizes import loss_positions
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.train.build import job_mesh

_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_UPDATED = 100_000_000  # elements of a shard


@dataclass(frozen=True)
class _Done:
    """The work that a kernel must do, and the prediction for it; `number` is that of its products."""

    flops: float = 0.0
    num_bytes: float = 0.0
    number: str = "bf16"
    predicted_s: float | None = None


def cases(bench: Bench) -> list[Case]:
    """Products, attention, elementwise kernels, loss, update and casts."""
    results: list[Case] = []
    for model in ("dense 1B", "8B, 4 layers"):
        job = job_of(bench, model, 8192)
        for name, (inner, columns) in _products(job).items():
            results.append((f"product, {name} of {model}", partial(_product, bench, job, name, inner, columns)))
        for name in ("norm", "rotary", "activation", "join"):
            results.append((f"{name}, {model}", partial(_ELEMENTWISE[name], bench, job)))
        results.append((f"loss, {model}", partial(_loss, bench, job)))
    wide = job_of(bench, "8B, 4 layers", 8192)
    for recipe in FLOAT8_RECIPES:
        for name, (inner, columns) in _products(wide).items():
            results.append((f"fp8 {recipe}, {name} of 8B", partial(_float8, bench, recipe, name, inner, columns)))
    results += [(f"attention, {length} tokens", partial(_attention, bench, length)) for length in _LENGTHS]
    results.append(("update, AdamW", partial(_update, bench)))
    results += [(f"cast, {to}", partial(_cast, bench, to)) for to in ("bf16", "fp8 by rows", "fp8 by tiles")]
    return bench.fewer(results)


def _products(job: JobSpec) -> dict[str, tuple[int, int]]:
    """Input and output width of the linear layers of a block, by the cost model's names."""
    m = job.model
    heads = m.heads * m.head_size
    return {
        "qkv": (m.hidden, heads + 2 * m.num_kv_heads * m.head_size), "out": (heads, m.hidden),
        "up": (m.hidden, 2 * m.ffn_size), "down": (m.ffn_size, m.hidden),
    }  # fmt: skip


def _tokens(job: JobSpec) -> int:
    return job.plan.microbatch_size * job.model.sequence


def _measured(bench: Bench, passes: dict[str, tuple[Callable[[], object], _Done]]) -> Row:
    """A row with a part for each pass: seconds, rates, and shares of the peak."""
    result = {name: _one(bench, work, done) for name, (work, done) in passes.items()}
    return {"ok": None, "passes": result}


def _one(bench: Bench, work: Callable[[], object], done: _Done) -> Row:
    seconds = time_s(bench, work)
    device = device_of(bench.catalog_name) if bench.catalog_name else None
    peak_flops = device.peak_flops(done.number) if device else 0.0
    peak_bytes = 1e9 * device.memory_gb_per_s if device else 0.0
    bound_s = max(done.flops / peak_flops if peak_flops else 0.0, done.num_bytes / peak_bytes if peak_bytes else 0.0)
    row: Row = {"seconds": seconds, "roofline_s": bound_s or None, "predicted_s": done.predicted_s}
    if seconds is None:
        return row
    row |= {"flops_per_s": done.flops / seconds[1]} if done.flops else {"bytes_per_s": done.num_bytes / seconds[1]}
    row |= {"of_roofline": bound_s / seconds[1] if bound_s else None}
    row |= {"over_predicted": seconds[1] / done.predicted_s if done.predicted_s else None}
    return row


def _told(bench: Bench, job: JobSpec, operator: str) -> dict[str, float]:
    """Predicted seconds of an operator of a layer by pass, where they are known."""
    prices = operator_prices(bench, job)
    if not prices:
        return {}
    time = prices[operator]
    passes = {"forward": time.forward, "input gradient": time.input_grad, "weight gradient": time.weight_grad}
    return {name: float(seconds) for name, seconds in passes.items()}


def _product(bench: Bench, job: JobSpec, name: str, inner: int, columns: int) -> Row:
    """A linear layer's three products; the last one adds to a sum in float32."""
    tokens, answer = _tokens(job), _told(bench, job, name)
    x, dy = bench.normal(tokens, inner), bench.normal(tokens, columns)
    weight, into = bench.normal(columns, inner, std=0.02), torch.zeros(columns, inner, device=bench.device)
    work: dict[str, Callable[[], object]] = {
        "forward": lambda: functional.linear(x, weight),
        "input gradient": lambda: dy @ weight,
        "weight gradient": lambda: add_product(into, dy, x, True, bench.kind),
    }
    flops = 2.0 * tokens * inner * columns
    return _measured(bench, {key: (one, _Done(flops, predicted_s=answer.get(key))) for key, one in work.items()})


def _float8(bench: Bench, recipe: str, name: str, inner: int, columns: int) -> Row:
    """Products in fp8 with their casts, the weight's left out for it is cast once a step; and the bare product."""
    job = job_of(bench, "8B, 4 layers", 8192, float8=recipe)
    tokens, answer = _tokens(job), _told(bench, job, name)
    x, dy, weight = bench.normal(tokens, inner), bench.normal(tokens, columns), bench.normal(columns, inner, std=0.02)
    state = make_float8_state(recipe)
    flops = 2.0 * tokens * inner * columns
    of_pass = {name: _Done(flops, 0, "fp8", answer.get(name)) for name in ("forward", "input gradient")}
    passes: dict[str, tuple[Callable[[], object], _Done]] = {
        "forward": (lambda: forward_product(state, x, weight), of_pass["forward"]),
        "input gradient": (lambda: input_gradient(state, dy, weight), of_pass["input gradient"]),
    }
    a, b = quantise(x, FLOAT8_RECIPES[recipe].activation, E4M3), quantise(weight, FLOAT8_RECIPES[recipe].weight, E4M3)
    if bench.is_dry or has_scaled_product(a, b):
        bare_s = _bare_s(bench, job, tokens, inner, columns)
        passes["product alone"] = (lambda: scaled_product(a, b, torch.bfloat16), _Done(flops, 0, "fp8", bare_s))
    return _measured(bench, passes)


def _bare_s(bench: Bench, job: JobSpec, rows: int, inner: int, columns: int) -> float | None:
    known = rates(bench, job)
    return float(product_s(known, rows, inner, columns, 1, rate=known.flops_product)) if known else None


def _attention(bench: Bench, length: int) -> Row:
    """Causal, 32 query heads of width 128 on 8 of keys, as model/attention_core.py calls it."""
    job = job_of(bench, "8B, 4 layers", length)
    m, answer = job.model, _told(bench, job, "attention")
    B, S, D = job.plan.microbatch_size, m.sequence, m.head_size
    # As the model has them in memory: the sequence before the batch.
    q, k, v, dout = (
        bench.normal(S, B, heads, D).permute(1, 2, 0, 3) for heads in (m.heads, m.num_kv_heads, m.num_kv_heads, m.heads)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def forward() -> Tensor:
        if bench.is_dry:
            return dry_attention(q, k, v, D**-0.5, bench.kind)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=D**-0.5, enable_gqa=True)

    out, flops = forward(), 2.0 * B * m.heads * S * S * D
    work = {
        "forward": (forward, _Done(flops, predicted_s=answer.get("forward"))),
        "backward": (_backward(out, (q, k, v), dout), _Done(2.5 * flops, predicted_s=answer.get("input gradient"))),
    }
    return _measured(bench, work)


def _backward(out: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _norm(bench: Bench, job: JobSpec) -> Row:
    tokens, hidden, answer = _tokens(job), job.model.hidden, _told(bench, job, "attention norm")
    if bench.kind != "cuda":
        return {"ok": None, "skipped": "these kernels are of CUDA"}
    x, dy, weight = bench.normal(tokens, hidden), bench.normal(tokens, hidden), bench.normal(hidden)
    _, inverse = rms_norm(x, weight, 1e-5)
    size = tokens * hidden
    return _measured(bench, {
        "forward": (lambda: rms_norm(x, weight, 1e-5), _Done(0, 4 * size, predicted_s=answer.get("forward"))),
        "backward": (lambda: rms_norm_backward(dy, x, inverse, weight),
                     _Done(0, 6 * size, predicted_s=answer.get("input gradient"))),
    })  # fmt: skip


def _rotary(bench: Bench, job: JobSpec) -> Row:
    m, answer = job.model, _told(bench, job, "rotary")
    S, B, queries = m.sequence, job.plan.microbatch_size, m.heads // m.num_kv_heads
    qkv = bench.normal(S, B, m.num_kv_heads, queries + 2, m.head_size).requires_grad_()
    angles = rotary_angles(torch.arange(S, device=bench.device), m.head_size, m.rotary_base)
    out = split_and_rotate(qkv, *angles)
    gradients = tuple(torch.ones_like(x) for x in out)
    num_bytes = 4 * qkv.numel()
    return _measured(bench, {
        "forward": (lambda: split_and_rotate(qkv, *angles), _Done(0, num_bytes, predicted_s=answer.get("forward"))),
        "backward": (lambda: torch.autograd.grad(out, qkv, gradients, retain_graph=True),
                     _Done(0, num_bytes, predicted_s=answer.get("input gradient"))),
    })  # fmt: skip


def _activation(bench: Bench, job: JobSpec) -> Row:
    tokens, inner, answer = _tokens(job), job.model.ffn_size, _told(bench, job, "activation")
    fused, dy = bench.normal(tokens, 2 * inner).requires_grad_(), bench.normal(tokens, inner)
    out, size = activate_gated(fused, "silu"), tokens * inner
    return _measured(bench, {
        "forward": (lambda: activate_gated(fused, "silu"), _Done(0, 6 * size, predicted_s=answer.get("forward"))),
        "backward": (_backward(out, (fused,), dy), _Done(0, 10 * size, predicted_s=answer.get("input gradient"))),
    })  # fmt: skip


def _join(bench: Bench, job: JobSpec) -> Row:
    tokens, hidden, answer = _tokens(job), job.model.hidden, _told(bench, job, "attention join")
    x, y = bench.normal(tokens, hidden), bench.normal(tokens, hidden)
    return _measured(bench, {"forward": (lambda: x + y, _Done(0, 6 * x.numel(), predicted_s=answer.get("forward")))})


_ELEMENTWISE = {"norm": _norm, "rotary": _rotary, "activation": _activation, "join": _join}


def _loss(bench: Bench, job: JobSpec) -> Row:
    """Head and loss, forward and all gradients, chunk by chunk."""
    m, tokens = job.model, _tokens(job)
    stand_ins = StandIns(lambda lines: DryTransport(is_gloo=False), bench.kind) if bench.is_dry else None
    mesh = job_mesh(job, 0, bench.device, stand_ins=stand_ins)
    cut = LayerSharding(mesh.tp, mesh.cp, mesh.ep, mesh.expert_tp)
    place = ParameterShard((m.vocab, m.hidden), ((0, m.vocab), (0, m.hidden)), "normal", 0.02, "head")
    weight = PlacedParameter(bench.normal(m.vocab, m.hidden, std=0.02), place)
    weight.gradient = torch.zeros(m.vocab, m.hidden, device=bench.device)
    x = bench.normal(m.sequence, job.plan.microbatch_size, m.hidden).requires_grad_()
    ids = torch.randint(m.vocab, (tokens,), device=bench.device)
    targets = Targets(ids, None, loss_positions(job))

    def both() -> None:
        torch.autograd.grad(microbatch_loss(x, HeadWeights(weight), targets, cut), x)

    known, answer = rates(bench, job), None
    if known:
        shapes = ((tokens, m.hidden, m.vocab), (tokens, m.vocab, m.hidden), (m.vocab, tokens, m.hidden))
        moved = sum(loss_traffic(software_of("shardwright").loss)) * tokens * m.vocab / known.memory_bytes_per_s
        answer = float(moved + sum(product_s(known, *shape, 1, rate=known.flops) for shape in shapes))
    done = _Done(6.0 * tokens * m.hidden * m.vocab, predicted_s=answer)
    return _measured(bench, {"forward and backward": (both, done)})


def _update(bench: Bench) -> Row:
    """The clipped update of a shard and its copy to bf16. Its least traffic: gradient, master and two moments in,
    and all but the gradient and the weights in bf16 out."""
    size = _UPDATED // 1000 if bench.is_quick or bench.kind == "cpu" else _UPDATED
    job = job_of(bench, "dense 1B", 8192)
    values = torch.zeros(size, dtype=torch.bfloat16, device=bench.device)
    masters = Masters([ShardPiece(0, size, True, on_host=False)], values, bench.device)
    masters.make_optimizer(partial(make_optimizer, job.optimizer))
    gradients = torch.ones(size, device=bench.device)

    def update() -> None:
        masters.step(gradients, 0.999, 1e-4)
        masters.write_values(values)

    known = rates(bench, job)
    answer = software_of("shardwright").update * size / known.memory_bytes_per_s if known else None
    return _measured(bench, {"update": (update, _Done(0, 30 * size, predicted_s=answer))})


def _cast(bench: Bench, to: str) -> Row:
    """Of a matrix as wide as the MLP of the 8B: from float32 to bf16, from bf16 to fp8 with its scales."""
    tokens = 1024 if bench.is_quick else 16384
    if to == "bf16":
        x, out = bench.normal(tokens, 14336, dtype=torch.float32), bench.normal(tokens, 14336)
        return _measured(bench, {"cast": (lambda: out.copy_(x), _Done(0, 6 * x.numel()))})
    x = bench.normal(tokens, 14336)
    by: Granularity = "row" if "rows" in to else "tile"
    return _measured(bench, {"cast": (lambda: quantise(x, by, E4M3), _Done(0, 3 * x.numel()))})
