"""Operators of the CUDA branch, one by one, against plain float64 on the CPU: for part equal of gpu.py.

A result in a narrower number type is rounded once or twice: limits are so many halves of a unit in its last place, and
what a sum in float32 over the inner dim adds.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from gpu_bench import CPU, Bench, Case, Row, judged, relative
from torch import Tensor

from shardwright.config.nf4_rows import BLOCK, GROUP, Nf4Row
from shardwright.measure.rounding import HALF_UNIT
from shardwright.model.activation import activate_gated
from shardwright.model.dropout import kept_elements
from shardwright.model.fused_softmax import exponential_sums, softmax_gradient
from shardwright.model.norm import rms_norm, rms_norm_backward
from shardwright.model.rotary import rotary_angles, turn
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.block_attention import Merged, attend_block, block_gradients
from shardwright.parallel.context.sight import AttentionBlock, Sight
from shardwright.parallel.expert.grouped_linear import grouped_product
from shardwright.parallel.tensor.gradient_sums import add_product
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.precision.float8 import E4M3, E5M2, Granularity, quantise
from shardwright.precision.float8_product import emulated_product
from shardwright.precision.nf4 import dequantise, levels
from shardwright.precision.nf4 import quantise as quantise_nf4
from shardwright.precision.scaled_mm import has_scaled_product, scaled_product
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.score_blocks import ALL, KeyReach

_NAMES = {torch.float32: "float32", torch.bfloat16: "bf16"}
_GRANULARITIES: tuple[tuple[Granularity, Granularity], ...] = (("tensor", "tensor"), ("row", "row"), ("tile", "block"))
_LEAST = 1e-5  # of float32, where kernels may make a product out of three of TF32
_BOXES = (  # a part of a tensor of more elements than 32 bits count, columns of several blocks, and one dim
    ((256, 4096, 7168), ((254, 256), (100, 900), (13, 7000))),
    ((5000, 3), ((1, 4999), (1, 3))),
    ((9000,), ((7, 9000),)),
)


def operator_cases(bench: Bench) -> list[Case]:
    """Cases of operators; on a CPU only those that a CPU has."""
    results: list[Case] = [
        (f"block attention, {_NAMES[dtype]}{name}", partial(_block_attention, bench, dtype, what))
        for dtype in (torch.float32, torch.bfloat16) for name, what in _ATTENDED.items()
    ]  # fmt: skip
    results += [(f"grouped product, {_NAMES[d]}", partial(_grouped, bench, d)) for d in (torch.bfloat16, torch.float32)]
    results += [("added products, bf16 to float32", partial(_added, bench))]
    results += [("initial weights, bit for bit", partial(_initial, bench))]
    results += [("dropout masks, bit for bit", partial(_masks, bench))]
    results += [(f"numbers of NF4, {_NAMES[dtype]}", partial(_nf4, bench, dtype)) for dtype in _NAMES]
    if bench.kind == "cuda":
        results += [(f"fused norm, {_NAMES[d]}", partial(_norm, bench, d)) for d in (torch.bfloat16, torch.float32)]
        fused = {"gated activation": _gated, "rotary turn": _turn, "softmax": _softmax}
        results += [(f"{name}, {_NAMES[d]}", partial(work, bench, d)) for name, work in fused.items() for d in _NAMES]
        results += [(f"fp8 product, {a} x {b}", partial(_float8, bench, a, b)) for a, b in _GRANULARITIES]
    return results


def _limit(dtype: torch.dtype, inner: int, roundings: int = 2) -> float:
    return roundings * HALF_UNIT[_NAMES[dtype]] + HALF_UNIT["float32"] * math.sqrt(inner) * 4


@dataclass(frozen=True)
class _Attended:
    """The keys that a rule attends to: tokens of one's own document, or so many before, with scores held down, less by
    distance, or one more for each head."""

    has_documents: bool = False
    reach: KeyReach = ALL
    softcap: float = 0.0
    has_slopes: bool = False
    has_sinks: bool = False

    def rule(self, heads: int, device: torch.device) -> AttentionRule:
        """The rule as blocks are computed by it."""
        slopes_N = 0.5 ** torch.arange(1, heads + 1, device=device) if self.has_slopes else None
        return AttentionRule(reach=self.reach, softcap=self.softcap, slopes_N=slopes_N)


_ATTENDED = {
    "": _Attended(),
    ", documents": _Attended(has_documents=True),
    ", window": _Attended(reach=KeyReach(50)),
    ", chunks": _Attended(reach=KeyReach(50, is_chunked=True)),
    ", soft cap": _Attended(softcap=2.0),
    ", soft cap and window": _Attended(reach=KeyReach(50), softcap=2.0),
    ", ALiBi": _Attended(has_slopes=True),
    ", sinks": _Attended(has_sinks=True),
}


def _block_attention(bench: Bench, dtype: torch.dtype, what: _Attended) -> Row:
    """A sequence that is cut in two by hand: the second half's queries see the first half's keys, then their own."""
    B, N, G, S, D = 2, 8, 2, 256, 64
    q, k, v, dout = (bench.normal(B, heads, S, D, dtype=dtype) for heads in (N, G, G, N))
    documents = torch.arange(S, device=bench.device).div(100, rounding_mode="floor").expand(B, S)
    half, rule = S // 2, what.rule(N, bench.device)
    sinks_N = bench.normal(N, dtype=torch.float32) if what.has_sinks else None

    def sight(queries: slice, keys: slice) -> Sight:
        its = (documents[:, queries], documents[:, keys]) if what.has_documents else (None, None)
        reach = rule.reach if rule.goes_by_position(S) else None
        return Sight(queries == keys, *its, reach, queries.start, keys.start, rule.slopes_N)

    def block(queries: slice, keys: slice) -> AttentionBlock:
        its = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        return AttentionBlock(*its, sight(queries, keys), rule, bench.kind)

    first, second = slice(0, half), slice(half, S)
    pairs = ((first, first), (second, first), (second, second))
    (early, its_lse), past, own = (attend_block(block(queries, keys)) for queries, keys in pairs)
    merged = Merged(*past)
    merged.add(slice(0, half), *own)
    whole = Merged(torch.cat((early.float(), merged.out_BNSD), dim=2), torch.cat((its_lse, merged.lse_BNS), dim=2))
    if sinks_N is not None:
        whole.add_score(sinks_N)
    # In memory [B, S, N, D], as the runtime has it: a kernel of CUDA takes that for granted.
    out = whole.out_BNSD.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    lse = whole.lse_BNS
    gradients = [torch.zeros(x.shape, device=bench.device) for x in (q, k, v)]
    for queries, keys in pairs:
        parts = block_gradients(
            block(queries, keys), dout[:, :, queries], out[:, :, queries], lse[:, :, queries].contiguous()
        )
        for into, part, place in zip(gradients, parts, (queries, keys, keys), strict=True):
            into[:, :, place] += part
    wanted = _plain_attention(bench, q, k, v, dout, documents, what, sinks_N)
    names = ("output", "dq", "dk", "dv")
    differences = {n: relative(a, b) for n, a, b in zip(names, (out, *gradients), wanted, strict=True)}
    # Scores, weights and their gradients are rounded on the way.
    return judged(bench, differences, dict.fromkeys(names, max(_LEAST, _limit(dtype, S, roundings=8))))


def _plain_attention(
    bench: Bench, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, documents: Tensor, what: _Attended,
    sinks_N: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Softmax of all scores, and autograd's gradients."""
    if bench.is_dry:
        return [q, q, k, v]
    q, k, v = (x.detach().double().cpu().requires_grad_() for x in (q, k, v))
    queries, S = q.shape[1] // k.shape[1], q.shape[2]
    scores = q @ k.repeat_interleave(queries, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    if what.softcap:
        scores = what.softcap * (scores / what.softcap).tanh()
    behind = torch.arange(S)[:, None] - torch.arange(S)
    rule = what.rule(q.shape[1], CPU)
    if rule.slopes_N is not None:
        scores = scores - rule.slopes_N.double()[:, None, None] * behind
    allowed = behind >= 0
    if what.reach.is_chunked:
        allowed = allowed & (torch.arange(S)[:, None] // what.reach.window == torch.arange(S) // what.reach.window)
    elif what.reach.window:
        allowed = allowed & (behind < what.reach.window)
    if what.has_documents:
        own = documents.cpu()
        allowed = (own[:, :, None] == own[:, None, :])[:, None] & allowed
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks_N is not None:
        beside = sinks_N.double().cpu()[:, None, None].expand(len(scores), -1, S, 1)
        scores = torch.cat((scores, beside), dim=-1)
    out = scores.softmax(-1)[..., :S] @ v.repeat_interleave(queries, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double().cpu())]


def _grouped(bench: Bench, dtype: torch.dtype) -> Row:
    """One expert has no rows."""
    counts = torch.tensor([40, 0, 24, 136])
    x, weights = bench.normal(200, 256, dtype=dtype), bench.normal(4, 256, 128, dtype=dtype)
    result = grouped_product(x, weights, counts, bench.kind)
    if bench.is_dry:
        return judged(bench, {"output": relative(result, x[:, :128])}, {"output": _limit(dtype, 256)})
    parts = zip(x.double().cpu().split(counts.tolist()), weights.double().cpu(), strict=True)
    return judged(bench, {"output": relative(result, torch.cat([a @ b for a, b in parts]))},
                  {"output": _limit(dtype, 256)})  # fmt: skip


def _added(bench: Bench) -> Row:
    """The first product is put there, the second added to it, and no result is rounded to bf16."""
    dy, x = bench.normal(512, 192), bench.normal(512, 320)
    into = torch.empty(192, 320, device=bench.device)
    for has_sum in (False, True):
        add_product(into, dy, x, has_sum, bench.kind)
    exact = into if bench.is_dry else 2 * (dy.double().cpu().t() @ x.double().cpu())
    # A CPU rounds each product to bf16 first.
    limit = _limit(torch.float32 if bench.kind == "cuda" else torch.bfloat16, 512)
    return judged(bench, {"sum": relative(into, exact)}, {"sum": limit})


def _norm(bench: Bench, dtype: torch.dtype) -> Row:
    x, dy, weight = (bench.normal(*shape, dtype=dtype) for shape in ((512, 1024), (512, 1024), (1024,)))
    y, inverse = rms_norm(x, weight, 1e-5)
    dx, dweight = rms_norm_backward(dy, x, inverse, weight)
    wanted: list[Tensor] = [x, x, weight]
    if not bench.is_dry:
        exact, w = (t.double().cpu().requires_grad_() for t in (x, weight))
        out = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
        wanted = [out.detach(), *torch.autograd.grad(out, (exact, w), dy.double().cpu())]
    names = ("output", "dx", "dweight")
    differences = {n: relative(a, b) for n, a, b in zip(names, (y, dx, dweight), wanted, strict=True)}
    return judged(bench, differences, dict.fromkeys(names, _limit(dtype, 1024)))


def _gated(bench: Bench, dtype: torch.dtype) -> Row:
    """act(gate) x up and both gradients, by number of rows: the compiler makes one kernel of all."""
    errors = {}
    for rows in (512, 37):
        x, dy = bench.normal(rows, 768, dtype=dtype), bench.normal(rows, 384, dtype=dtype)
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        result, (gate, up) = activate_gated(leaf, "silu"), exact.chunk(2, dim=-1)
        answer = torch.nn.functional.silu(gate) * up
        result.backward(dy)
        answer.backward(dy.double())
        errors |= {
            f"output of {rows}": relative(result, answer),
            f"gradient of {rows}": relative(leaf.grad, exact.grad),
        }
    return judged(bench, errors, dict.fromkeys(errors, _limit(dtype, 1)))


def _turn(bench: Bench, dtype: torch.dtype) -> Row:
    """Pairs as halves and side by side, written into a part of a tensor."""
    x = bench.normal(300, 2, 4, 1, 64, dtype=dtype)
    cosine, sine = rotary_angles(torch.arange(300, device=bench.device), 64, 1e4)
    errors = {}
    for interleaved in (False, True):
        whole = x.new_zeros(*x.shape[:-1], 80)
        turn(x, cosine, sine, whole[..., 16:], interleaved)
        exact = x.double()
        first, second = (exact[..., 0::2], exact[..., 1::2]) if interleaved else exact.chunk(2, dim=-1)
        turned = first * cosine - second * sine, second * cosine + first * sine
        answer = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        errors["side by side" if interleaved else "halves"] = relative(whole[..., 16:], answer)
    return judged(bench, errors, dict.fromkeys(errors, _limit(dtype, 1)))


def _softmax(bench: Bench, dtype: torch.dtype) -> Row:
    """Sums of exponentials, and the gradient of the logits, in float32 or 16 bits."""
    logits, rows = bench.normal(200, 5000, dtype=torch.float32), torch.arange(200, device=bench.device)
    exact = logits.double()
    largest, sums, factors = logits.amax(-1), logits.new_empty(200), torch.full((200,), 0.25, device=bench.device)
    exponential_sums(logits, largest, False, sums)
    gradient = torch.empty_like(logits, dtype=dtype)
    softmax_gradient(logits, largest, factors / sums, rows, factors, 0.0, gradient)
    answer = torch.softmax(exact, dim=-1)
    answer[rows, rows] -= 1.0
    errors = {
        "sums": relative(sums, (exact - largest[:, None]).exp().sum(-1)), "gradient": relative(gradient, answer * 0.25)
    }  # fmt: skip
    return judged(bench, errors, {"sums": _limit(torch.float32, 5000), "gradient": _limit(dtype, 5000)})


def _float8(bench: Bench, of_first: Granularity, of_second: Granularity) -> Row:
    """The device's own product of fp8 matrices beside the same numbers in float32, one with gradients in e5m2."""
    x, w = bench.normal(256, 512), bench.normal(384, 512)
    differences = {}
    for name, kind in (("e4m3", E4M3), ("e5m2", E5M2)):
        if kind is E5M2 and of_first == "tile":
            continue  # small tiles need no wider range
        a, b = quantise(x, of_first, kind), quantise(w, of_second, E4M3)
        if not bench.is_dry and not has_scaled_product(a, b):
            return {"skipped": "this device or this CUDA has no such product"}
        result = scaled_product(a, b, torch.bfloat16)
        differences[name] = relative(result, emulated_product(a, b, torch.float32))
    # Tensor cores keep about 14 bits of a sum (arXiv 2412.19437, section 3.3.2).
    return judged(bench, differences, dict.fromkeys(differences, 2 * HALF_UNIT["bf16"] + 2.0**-13 * math.sqrt(512)))


def _nf4(bench: Bench, dtype: torch.dtype) -> Row:
    """Rows of a group and a half, whole and in part, with scales in float32 and in 8 bits."""
    full = 3 * BLOCK * GROUP // 2
    x_RC = torch.randn(40, full, generator=torch.Generator().manual_seed(3))
    errors = {}
    for name, first, is_double in (("whole", 0, False), ("8 bits", 0, True), ("8 bits, a part", full // 2, True)):
        row = Nf4Row(first, full, full, is_double=is_double)
        words_RW = quantise_nf4(x_RC if is_double else x_RC[:, first:], row)
        result = dequantise(words_RW.to(bench.device), row, dtype)
        errors[name] = relative(result, result if bench.is_dry else _plain_nf4(words_RW, row))
    return judged(bench, errors, dict.fromkeys(errors, _limit(dtype, 1)))


def _plain_nf4(words_RW: Tensor, row: Nf4Row) -> Tensor:
    """Levels times scales in float64 on a CPU, from bytes."""
    codes, scales, greatest = words_RW.split((row.code_words, row.scale_words, row.group_words), dim=1)
    pairs = codes.contiguous().view(torch.uint8).long()
    values_RC = levels("nf4", CPU).double()[torch.stack((pairs // 16, pairs % 16), dim=-1).flatten(1)]
    scales_RB = scales.contiguous().view(torch.float32).double()
    if row.is_double:
        bytes_RB = scales.contiguous().view(torch.uint8)[:, : row.num_blocks].long()
        group_B = (torch.arange(row.num_blocks) + row.first // BLOCK) // GROUP
        scales_RB = levels("scales", CPU).double()[bytes_RB] * greatest.contiguous().view(torch.float32)[:, group_B]
    return values_RC * scales_RB.repeat_interleave(BLOCK, dim=1)


def _initial(bench: Bench) -> Row:
    """Initial weights bit for bit. Tensors of a dry run have no values, so that the CPU writes them there."""
    same = []
    for shape, box in _BOXES:
        place = ParameterShard(shape, box, "normal", 0.006, "layers.3.weight")
        result = initial_box(place, 12, CPU if bench.is_dry else bench.device)
        same.append(torch.equal(result.cpu(), initial_box(place, 12, CPU)))
    return {"ok": None if bench.is_dry else all(same), "same": same}


def _masks(bench: Bench) -> Row:
    rows = torch.arange(8192).view(4096, 2) * 3
    result = kept_elements(rows.to(bench.device), 1026, key=2**61 + 7, num_dropped_levels=6554)
    if bench.is_dry:
        return {"ok": None}
    same = torch.equal(result.cpu(), kept_elements(rows, 1026, key=2**61 + 7, num_dropped_levels=6554))
    return {"ok": same, "kept": result.float().mean().item()}
