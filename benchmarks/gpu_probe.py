"""Ten questions that only a device answers, a line each: asked before anything is measured on it.

    .venv/bin/python benchmarks/gpu_probe.py          # make gpu-probe: on the first CUDA device, a minute
    .venv/bin/python benchmarks/gpu_probe.py --dry    # on tensors without memory: that all calls are as torch has them

An error is a line too, and the next question is asked.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_bench import Bench, relative
from torch import Tensor
from torch.nn import functional

from shardwright.model.norm import rms_norm, rms_norm_backward
from shardwright.parallel.context.block_attention import dry_attention
from shardwright.parallel.expert.grouped_linear import grouped_product
from shardwright.parallel.tensor.gradient_sums import add_product
from shardwright.precision.float8 import E4M3, E5M2, Granularity, quantise
from shardwright.precision.float8_product import emulated_product
from shardwright.precision.scaled_mm import scaled_product

_MIB = 2**20
_RUNS = 10
_MOST_SAID, _MOST_OF_ERROR = 2000, 160  # letters


def context_memory(bench: Bench) -> str:
    """The memory that the driver's context takes, before anything else is there and after a product."""
    if bench.is_dry:
        return "a dry run has no context"

    def beside_mib() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / _MIB

    torch.cuda.init()
    first = beside_mib()
    bench.normal(1024, 1024) @ bench.normal(1024, 1024)
    torch.cuda.synchronize()
    return f"{first:.0f} MiB, {beside_mib():.0f} MiB after a product"


def attention_backward(bench: Bench) -> str:
    """Errors of dq and dk by the layout in memory of the output, two samples in bf16."""
    B, N, S, D = 2, 8, 512, 64
    q, k, v, dout = (bench.normal(B, S, N, D).transpose(1, 2) for _ in range(4))
    attend, differentiate = (
        getattr(torch.ops.aten, f"_scaled_dot_product_efficient_attention{name}") for name in ("", "_backward")
    )
    out, lse, *_ = attend(q, k, v, None, True, 0.0, True)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(2, 3) * D**-0.5
    hidden = torch.ones(S, S, dtype=torch.bool, device=bench.device).triu(1)
    answer = torch.autograd.grad(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ exact[2], exact, dout.float())
    seed, printed = torch.zeros((), dtype=torch.int64, device=bench.device), []
    for name, order in (("BSND", (0, 2, 1, 3)), ("SBND", (2, 0, 1, 3)), ("BNSD", (0, 1, 2, 3))):
        back = [order.index(dim) for dim in range(4)]
        laid = out.permute(order).contiguous().permute(back)
        result = differentiate(dout, q, k, v, None, laid, lse, seed, seed, 0.0, [True, True, True, False], True)
        printed.append(f"out as {name} {relative(result[0], answer[0]):.1e} {relative(result[1], answer[1]):.1e}")
    return "; ".join(printed)


def added_products(bench: Bench) -> str:
    """A product in bf16 is added to float32 as one kernel, without rounding."""
    dy, x, into = bench.normal(512, 256), bench.normal(512, 128), torch.zeros(256, 128, device=bench.device)
    for has_sum in (False, True):
        add_product(into, dy, x, has_sum, bench.kind)
    return f"error {relative(into, 2 * (dy.float().t() @ x.float())):.1e} in {into.dtype}"


def grouped_products(bench: Bench) -> str:
    """torch's own kernel, with an empty expert and with no rows at all; and what the runtime calls."""
    weights, printed = bench.normal(4, 256, 128), []
    for counts in ([40, 0, 24, 136], [0, 0, 0, 0]):
        ends = torch.tensor(counts).cumsum(0).to(bench.device, torch.int32)
        x = bench.normal(sum(counts), 256)
        for name, multiply in (
            ("torch", lambda x=x, ends=ends: functional.grouped_mm(x, weights, offs=ends)),
            ("ours", lambda x=x, counts=counts: grouped_product(x, weights, torch.tensor(counts), bench.kind)),
        ):
            printed.append(f"{name} of {counts}: {_answer(bench, lambda call=multiply: f'{tuple(call().shape)}')}")
    return "; ".join(printed)


def scaled_products(bench: Bench) -> str:
    """Errors by the granularities of scales, numbers of the first operand, and numbers of the result."""
    x, w, printed = bench.normal(256, 512), bench.normal(384, 512), []
    pairs: list[tuple[Granularity, Granularity]] = [("tensor", "tensor"), ("row", "row"), ("tile", "block")]
    for first, second in [*pairs, ("tile", "tile")]:
        for kind in (E4M3, E5M2):
            for out_dtype in (torch.bfloat16, torch.float32):
                a, b = quantise(x, first, kind), quantise(w, second, E4M3)

                def ask(a=a, b=b, out_dtype=out_dtype) -> str:
                    result = scaled_product(a, b, out_dtype)
                    answer = result if bench.is_dry else emulated_product(a, b, torch.float32)
                    return f"{relative(result, answer):.1e}"

                numbers = f"{str(kind)[13:17]} {str(out_dtype)[6:]}"
                printed.append(f"{first} x {second} {numbers} {_answer(bench, ask)}")
    return "; ".join(printed)


def attention_kernels(bench: Bench) -> str:
    """Kernels that torch takes for causal attention in bf16, 32 heads on 8 of keys, forward and backward."""
    B, S, D = 2, 4096, 128
    q, k, v = (bench.normal(S, B, heads, D).permute(1, 2, 0, 3).requires_grad_() for heads in (32, 8, 8))
    if bench.is_dry:
        return f"a dry run takes {type(dry_attention(q, k, v, None, bench.kind).grad_fn).__name__}"

    def both() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    both()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        both()
        torch.cuda.synchronize()
    longest = sorted(profiled.key_averages(), key=lambda of: -of.device_time_total)[:3]
    return "; ".join(f"{of.key[:70]} {of.device_time_total:.0f} us" for of in longest)


def fused_norm(bench: Bench) -> str:
    """Errors of the backward of the fused RMS norm, and whether another run has the same bits."""
    x, dy, weight = bench.normal(8192, 2048), bench.normal(8192, 2048), bench.normal(2048)
    _, inverse = rms_norm(x, weight, 1e-5)
    results = rms_norm_backward(dy, x, inverse, weight)
    wide, w = (t.float().requires_grad_() for t in (x, weight))
    out = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
    answer = torch.autograd.grad(out, (wide, w), dy.float())
    errors = [relative(a, b) for a, b in zip(results, answer, strict=True)]
    same = _repeats(bench, lambda: rms_norm_backward(dy, x, inverse, weight)[1])
    return f"dx {errors[0]:.1e}, dweight {errors[1]:.1e}; the same bits in {same}"


def sums_by_index(bench: Bench) -> str:
    """How many of ten runs have the bits of the first: rows of an embedding's gradient, some of them often."""
    tokens = torch.randint(1, 1000, (16384,), device=bench.device).float().log2().long()
    printed = []
    for dtype in (torch.float32, torch.bfloat16):
        rows, into = bench.normal(16384, 512, dtype=dtype), torch.zeros(1000, 512, dtype=dtype, device=bench.device)
        added = _repeats(bench, lambda rows=rows, into=into: into.index_add(0, tokens, rows))
        put = _repeats(bench, lambda rows=rows, into=into: into.index_put((tokens,), rows, accumulate=True))
        printed.append(f"{str(dtype)[6:]}: index_add {added}, index_put {put}")
    return "; ".join(printed)


def launches(bench: Bench) -> str:
    """The time that a launch takes of the host: of a kernel in place, and of a small product through autograd."""
    x, w = bench.normal(16, 16), bench.normal(16, 16).requires_grad_()
    printed = []
    for name, work in (("in place", lambda: x.add_(1.0)), ("a product", lambda: x @ w)):
        for number in (50, 500):  # the first warms up; a device's queue has room for about a thousand
            bench.settle()
            start_s = time.perf_counter()
            for _ in range(number):
                work()
            taken_s = time.perf_counter() - start_s
        printed.append(f"{name} {1e3 * taken_s / number:.4f} ms")
    return ", ".join(printed)


def pinned_copies(bench: Bench) -> str:
    """Rates to and from pinned memory, and what a tensor of a little more than a power of two takes there."""
    if bench.is_dry:
        return "a dry run copies nothing"
    there, host = torch.empty(2**30, dtype=torch.uint8, device=bench.device), torch.empty(2**30, dtype=torch.uint8)
    host = host.pin_memory()
    rates = []
    for out, source in ((host, there), (there, host)):
        for _ in range(2):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            out.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        rates.append(f"{2**30 / (time.perf_counter() - start_s) / 1e9:.1f} GB/s")
    del host
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    odd = torch.empty(65 * _MIB, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    return f"to the host {rates[0]}, from it {rates[1]}; {odd.nbytes // _MIB} MiB take {taken / _MIB:.0f}"


QUESTIONS: dict[str, Callable[[Bench], str]] = {
    "context": context_memory, "backward of efficient attention (dq, dk)": attention_backward,
    "addmm to float32": added_products, "grouped_mm": grouped_products, "scaled_mm": scaled_products,
    "attention's kernels": attention_kernels, "fused RMS norm": fused_norm, "sums by index": sums_by_index,
    "host, a launch": launches, "pinned memory": pinned_copies,
}  # fmt: skip


def _repeats(bench: Bench, work: Callable[[], Tensor]) -> str:
    first = work()
    same = [work() for _ in range(_RUNS)]
    return "no run" if bench.is_dry else f"{sum(torch.equal(first, one) for one in same)} of {_RUNS}"


def _answer(bench: Bench, ask: Callable[[], str]) -> str:
    """The answer, or the error that was raised, in one line."""
    try:
        printed = ask()
        bench.settle()
    except Exception as error:
        printed = f"{type(error).__name__}: {error}"[:_MOST_OF_ERROR]
    return " ".join(printed.split())[:_MOST_SAID]


def main() -> None:
    """Ask all questions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on tensors without memory, no device needed")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --dry asks without one", file=sys.stderr)
        sys.exit(2)
    bench = Bench("cuda", asked.dry, False, Path(), 0.0)
    name = "no device" if asked.dry else torch.cuda.get_device_name(0)
    print(f"device: {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
    for question, ask in QUESTIONS.items():
        print(f"{question}: {_answer(bench, lambda call=ask: call(bench))}", flush=True)


if __name__ == "__main__":
    main()
