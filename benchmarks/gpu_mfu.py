"""Part mfu of gpu.py: how fast whole jobs train on one device, where the time goes, and what was predicted.

Steps are timed by events at their ends, after steps that nobody times. MFU counts model FLOPs over the device's dense
peak of the products' number type, as a run's metrics do (train/metrics.py). Causes are kernels of one more step under
torch's profiler, told apart by their names; `idle` is the rest of that step, in which the device had no work.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from gpu_bench import Bench, Case, Row, quartiles
from gpu_jobs import MODELS, job_of, predicted
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.dry_steps import DrySteps
from shardwright.train.step_metrics import job_peak_flops, known_device
from shardwright.train.train_step import train_step

_WARM_UP, _STEPS = 2, 5
_MICROBATCHES = 2  # of a step: the second adds to what the first made
# Models beside those that every device runs first, by sequence and tokens of a microbatch.
_MORE: tuple[tuple[str, int, int], ...] = (
    ("512 wide", 1024, 4096),
    ("512 wide", 1024, 16384),
    ("GPT-2", 1024, 16384),
    ("GPT-2 medium", 1024, 16384),
    ("Qwen3 0.6B", 4096, 16384),
    ("Llama 3.2 3B", 4096, 16384),
    ("Llama 3 8B, adapters", 4096, 16384),
    ("Llama 3 8B, adapters over NF4", 4096, 16384),
)
# Words in the names of kernels. The first kind that has one of them is it.
_KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "wgmma", "splitk"),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset"),
}


def cases(bench: Bench) -> list[Case]:
    """Each model by sequence, in bf16 and with products in fp8; then more models, in bf16."""
    results: list[Case] = []
    for model in MODELS:
        for sequence in (4096, 8192):
            for float8 in ("none", "rowwise"):
                if float8 == "none" or not model.startswith("experts"):  # fp8 has no experts yet
                    name = f"{model}; {sequence} tokens, {'bf16' if float8 == 'none' else f'fp8 {float8}'}"
                    job = partial(job_of, bench, model, sequence, float8, microbatches=_MICROBATCHES)
                    results.append((name, partial(_trained, bench, job)))
    for model, sequence, tokens in _MORE:
        job = partial(job_of, bench, model, sequence, microbatches=_MICROBATCHES, tokens=tokens)
        results.append((f"{model}; {sequence} tokens, {tokens} at once, bf16", partial(_trained, bench, job)))
    return bench.fewer(results)


def _trained(bench: Bench, make_job: Callable[[], JobSpec]) -> Row:
    job = make_job()
    row: Row = {"ok": None, "predicted": predicted(bench, job), "tokens_per_step": job.tokens_per_step}
    if bench.is_dry:
        DrySteps(job, 0, "cuda").run()
        return row
    mesh = job_mesh(job, 0, bench.device)
    replica = build(job, mesh)
    batches = random_batches(bench, job, 2)
    for i in range(_WARM_UP):
        train_step(replica, i, batches[i % 2])
    seconds = _steps_s(bench, job, mesh, replica, batches)
    middle = seconds[1]
    device = known_device(job, bench.device)
    peak = job_peak_flops(job, device) if device else None
    flops_per_s = shape_of(job.model).flops_per_token() * job.tokens_per_step / middle
    row |= {
        "step_s": seconds,
        "tokens_per_s": job.tokens_per_step / middle,
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak if peak else None,
        "over_predicted": middle / row["predicted"]["total"] if row["predicted"] else None,
    }
    if bench.kind == "cuda":
        row["causes"] = _causes(job, mesh, replica, batches[0])
    return row


def random_batches(bench: Bench, job: JobSpec, number: int) -> list[Tensor]:
    """Global batches of random tokens on the device, [B, S + 1]."""
    shape = job.batch.global_batch_size, job.model.sequence + 1
    return [torch.randint(job.model.vocab, shape, device=bench.device) for _ in range(number)]


def _steps_s(bench: Bench, job: JobSpec, mesh: Mesh, replica: Replica, batches: list[Tensor]) -> list[float]:
    """Quartiles of the seconds from one step's end to the next one's."""
    if bench.kind != "cuda":
        return quartiles([_wall(job, mesh, replica, batches[i % 2], i) for i in range(2)])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        train_step(replica, _WARM_UP + i, batches[i % 2])
        mark.record()
    torch.cuda.synchronize()
    return quartiles([a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)])


def _wall(job: JobSpec, mesh: Mesh, replica: Replica, tokens: Tensor, step: int) -> float:
    start_s = time.perf_counter()
    train_step(replica, step, tokens)
    return time.perf_counter() - start_s


def _causes(job: JobSpec, mesh: Mesh, replica: Replica, tokens: Tensor) -> Row:
    """Seconds of a step by kind of kernel, and the rest of it; `elementwise` is what no word tells."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin.record()
        train_step(replica, _WARM_UP + _STEPS, tokens)
        end.record()
        torch.cuda.synchronize()
    result = dict.fromkeys((*_KINDS, "elementwise"), 0.0)
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            result[kind_of_kernel(event.name)] += event.time_range.elapsed_us() / 1e6
    span_s = begin.elapsed_time(end) / 1e3
    # Copies run beside kernels on streams of their own: what overlaps is counted twice.
    return result | {"idle": max(0.0, span_s - sum(result.values())), "step under the profiler": span_s}


def kind_of_kernel(name: str) -> str:
    """The purpose of a kernel, by its name."""
    low = name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in low for word in words)), "elementwise")
