"""Part train of gpu.py: the command `shardwright train` on one device, as a user starts it.

The other parts build a job's step and run it; here is what lies around it: the warm-up that compiles kernels out of a
dry step, batches that a thread reads, the watch, progress, saves while steps go on, and a second start that goes on
behind the newest save. A case is right if the command ends well, if it was as many steps as were asked for, and if the
loss fell. A dry run asks for the calls of the warm-up alone.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from gpu_bench import Bench, Case, Row, TimeIsOverError
from gpu_jobs import predicted

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.train.warm_up import kernel_calls

_STEPS, _WARM_UP = 12, 4
_ONE = (
    "cluster.nodes=1",
    "cluster.devices_per_node=1",
    "optimizer.warmup_steps=2",
    "model.sequence=128",
    f"optimizer.steps={_STEPS}",
)
_SMALL = "plan={microbatch_size=4, zero=1}"
_BATCH = "batch.global_batch_size=8"  # two microbatches: the second adds to what the first made
_BF16 = "precision.compute=bf16"
_LARGE = "GPT-2"  # minutes on a CPU
_JOBS: dict[str, tuple[str, ...]] = {
    "float32": (_SMALL, _BATCH),
    "bf16": (_SMALL, _BATCH, _BF16),
    "bf16, ZeRO 3 with state on the host": (
        "plan={microbatch_size=4, zero=3, offload_optimizer=1.0, offload_parameters=true}", _BATCH, _BF16,
    ),
    "fp16": (_SMALL, _BATCH, "precision.compute=fp16"),
    "fp8 by row": (_SMALL, _BATCH, _BF16, "precision.float8=rowwise"),
    "weights without masters": (_SMALL, _BATCH, _BF16, "precision.gradients=compute", "precision.master=none"),
    "experts": ("model.name=tiny-mixtral", _SMALL, _BATCH, _BF16),
    "adapters over NF4": (_SMALL, _BATCH, _BF16, "model.ffn=384", 'model.adapter={rank=8, base="nf4"}'),
    _LARGE: (
        "model.name=gpt2", "model.sequence=1024", "plan={microbatch_size=16, zero=1}", "batch.global_batch_size=32",
        _BF16,
    ),
}  # fmt: skip


def cases(bench: Bench) -> list[Case]:
    """Each job once, and one that is saved, started again and goes on."""
    names = [name for name in _JOBS if bench.kind == "cuda" or name != _LARGE]
    results: list[Case] = [(name, partial(_trained, bench, name)) for name in names]
    results.append(("saved, and gone on with", partial(_gone_on, bench)))
    return bench.fewer(results)


def _job(bench: Bench, name: str, *more: str) -> tuple[JobSpec, list[str]]:
    """A job and the command's words for it."""
    device = [f"cluster.device={bench.catalog_name}"] if bench.catalog_name else []
    fields = [*_ONE, *_JOBS[name], *device, *more]
    return load_job("quickstart", fields), ["quickstart", *(word for field in fields for word in ("--set", field))]


def _trained(bench: Bench, name: str) -> Row:
    job, words = _job(bench, name)
    if bench.is_dry:
        return _warmed_up(job)
    with tempfile.TemporaryDirectory() as folder:
        losses, seconds = _losses(_run(bench, words, Path(folder)), _STEPS)
    step_s = statistics.median(seconds[_WARM_UP:])
    answer = predicted(bench, job)
    row: Row = {"ok": losses[-1] < losses[0], "losses": [losses[0], losses[-1]], "step_s": step_s}
    return row | {"over_predicted": step_s / answer["total"] if answer else None}


def _warmed_up(job: JobSpec) -> Row:
    """A dry run's row: how many operators the warm-up would compile."""
    return {"ok": None, "kernels": len({call.operator for call in kernel_calls(job, 0)})}


def _gone_on(bench: Bench) -> Row:
    every = "checkpoint.every_steps=5"
    job, words = _job(bench, "bf16", every)
    if bench.is_dry:
        return _warmed_up(job)
    with tempfile.TemporaryDirectory() as folder:
        _run(bench, [*words, "--set", "optimizer.steps=7"], Path(folder))
        losses, _ = _losses(_run(bench, words, Path(folder)), _STEPS)
    return {"ok": losses[-1] < losses[0], "losses": [losses[0], losses[-1]]}


def _run(bench: Bench, words: list[str], folder: Path) -> Path:
    """Train into a folder. Returns it; raises what the command printed where it failed."""
    command = [sys.executable, "-m", "shardwright", "train", *words, "--set", f"run.folder={folder}"]
    left_s = max(1.0, bench.ends_s - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False, errors="replace")
    except subprocess.TimeoutExpired as late:
        raise TimeIsOverError({}) from late
    if done.returncode:
        raise RuntimeError(f"train ended with status {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return folder


def _losses(folder: Path, num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of all steps of a run, which must be as many as were asked for."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    if sorted(steps) != list(range(1, num_steps + 1)):
        raise RuntimeError(f"the run has steps {sorted(steps)}, and {num_steps} were asked for")
    return [steps[i]["loss"] for i in sorted(steps)], [steps[i]["step_s"] for i in sorted(steps)]
