"""Part memory of gpu.py: the most memory that jobs take on one device, beside the dry run's peak and the account's.

Measured is torch's allocator: what tensors hold (`allocated`) and what it took from the device (`reserved`), over two
steps, without what was there before. The kinds that stay are those of the replica; what is more at the peak is
activations and working memory together, for a run does not tell them apart.
"""

import gc
from functools import partial

import gpu_prepared
import torch
from gpu_bench import Bench, Case, Row
from gpu_jobs import MODELS, job_of
from gpu_mfu import random_batches

from shardwright.config.job import JobSpec
from shardwright.measure.dryrun import dry_run
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import train_step

_WITHIN = 0.03  # of the dry run's peak: what the allocator rounds up, and what kernels take for themselves
_VARIANTS = {
    "as it is": "zero=1",
    "ZeRO 3": "zero=3",
    "full recomputation": 'zero=1, recompute="full"',
    "selective recomputation": 'zero=1, recompute="selective", recompute_operators=["norm", "activation"]',
    "activations on the host": 'zero=1, recompute="full", offload_activations=true',
    "a quarter of the optimizer on the host": "zero=1, offload_optimizer=0.25",
    "parameters on the host": "zero=3, offload_parameters=true, offload_optimizer=0.25",
}

_MORE = ("GPT-2", "Llama 3.2 3B", "Llama 3 8B, adapters", "Llama 3 8B, adapters over NF4")


def cases(bench: Bench) -> list[Case]:
    """The jobs of part mfu, variants of the slice of 8B, and whole models."""
    return bench.fewer([(name, partial(_peak, bench, job)) for name, job in jobs(bench).items()])


def jobs(bench: Bench) -> dict[str, JobSpec]:
    """The jobs by their cases."""
    asked = {f"{model}; bf16": (model, "none", _VARIANTS["as it is"]) for model in MODELS}
    asked["dense 1B; fp8 rowwise"] = ("dense 1B", "rowwise", _VARIANTS["as it is"])
    for name, plan in list(_VARIANTS.items())[1:]:
        asked[f"8B, 4 layers; {name}"] = ("8B, 4 layers", "none", plan)
    for model in _MORE:
        asked[f"{model}; bf16"] = (model, "none", _VARIANTS["as it is"])
    return {
        name: job_of(bench, model, 4096, float8, plan, microbatches=2) for name, (model, float8, plan) in asked.items()
    }


def dry_row(job: JobSpec) -> Row:
    """The peak of a dry run, and the bytes of the account."""
    dry = dry_run(job, 0, "cuda")
    peak = dry.peak.as_dict() | {"operator": dry.peak.operator, "action": dry.peak.action}
    return {"dry": peak, "account": dry.account.as_dict(), "dry torch": torch.__version__}


def _peak(bench: Bench, job: JobSpec) -> Row:
    row = {"ok": None} | gpu_prepared.HERE.dry_run(gpu_prepared.key_of(job), partial(dry_row, job))
    if bench.is_dry or bench.kind != "cuda":
        return row
    measured = _measure(bench, job)
    of_dry = measured["allocated"] / row["dry"]["total_bytes"]
    return row | {"measured": measured, "over_dry": of_dry, "ok": abs(of_dry - 1) <= _WITHIN}


def _measure(bench: Bench, job: JobSpec) -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    mesh = job_mesh(job, 0, bench.device)
    replica = build(job, mesh)
    (tokens,) = random_batches(bench, job, 1)
    train_step(replica, 0, tokens)  # the first makes the optimizer's state
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train_step(replica, 1, tokens)
    torch.cuda.synchronize()
    held = replica.memory()
    allocated = torch.cuda.max_memory_allocated() - before
    return held.as_dict() | {
        "allocated": allocated,
        "reserved": torch.cuda.max_memory_reserved() - taken,
        "beside state and buffers": allocated - held.state_bytes - held.buffers_bytes,
    }
