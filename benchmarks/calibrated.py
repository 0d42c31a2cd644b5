"""Predicted against measured steps of 25 plans, after a calibration of the machine that runs them.

    .venv/bin/python benchmarks/calibrated.py [--device FILE] [--pause SECONDS]

Without a FILE of `shardwright calibrate` it calibrates first. Models of 5 to 100 million parameters on one rank and on
two; tensor, pipeline, data and context parallel, the stages of ZeRO, recomputation, bf16. Each plan is predicted, and
then run. Of its steps those count during which other programs of the machine took the least of its processors, a
quarter of them: the median of these. Prints the table of docs/calibrate.md.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.measure.calibrate.calibration_run import calibrate_here, ranks_here
from shardwright.measure.calibrate.sweep import Sweep
from shardwright.parallel.comm.collectives import all_reduce_max, barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.planner.own_plan import estimate
from shardwright.report.toml_files import write_device
from shardwright.sharding.stage_parameters import num_parameters
from shardwright.train.build import build
from shardwright.train.launch.launch import launch
from shardwright.train.step_metrics import measure_shares
from shardwright.train.train_step import train_step

SMALL = {"layers": 6, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 2048, "sequence": 256}
MIDDLE = {"layers": 8, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 4096, "sequence": 256}
LARGE = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 2048, "vocab": 8192, "sequence": 256}
GPT = {
    "layers": 8, "hidden": 512, "heads": 8, "vocab": 4096, "sequence": 256, "norm": "layernorm", "activation": "gelu",
    "gated_mlp": False, "positions": "learned",
}  # fmt: skip

Plan = tuple[str, dict[str, Any], dict[str, Any], int, str]  # name, model, plan, global batch, number type
PLANS: tuple[Plan, ...] = (
    ("small", SMALL, {"microbatch_size": 4}, 4, "float32"),
    ("small bf16", SMALL, {"microbatch_size": 4}, 8, "bf16"),
    ("small, recompute", SMALL, {"microbatch_size": 4, "recompute": "full"}, 8, "float32"),
    ("small, long", SMALL | {"sequence": 1024}, {"microbatch_size": 1}, 2, "float32"),
    ("middle", MIDDLE, {"microbatch_size": 2}, 2, "float32"),
    ("middle bf16", MIDDLE, {"microbatch_size": 2}, 2, "bf16"),
    ("middle, recompute bf16", MIDDLE, {"microbatch_size": 4, "recompute": "full"}, 8, "bf16"),
    ("gpt", GPT, {"microbatch_size": 2}, 4, "float32"),
    ("large bf16", LARGE, {"microbatch_size": 4}, 8, "bf16"),
    ("small tp 2", SMALL, {"tp": 2, "microbatch_size": 4}, 4, "float32"),
    ("small tp 2 sp", SMALL, {"tp": 2, "sequence_parallel": True, "microbatch_size": 4}, 8, "float32"),
    ("middle tp 2", MIDDLE, {"tp": 2, "microbatch_size": 4}, 4, "float32"),
    ("middle tp 2 sp bf16", MIDDLE, {"tp": 2, "sequence_parallel": True, "microbatch_size": 2}, 4, "bf16"),
    ("small pp 2", SMALL, {"pp": 2, "microbatch_size": 2}, 8, "float32"),
    ("middle pp 2", MIDDLE, {"pp": 2, "microbatch_size": 1}, 4, "float32"),
    ("small pp 2 zb-h1", SMALL, {"pp": 2, "schedule": "zb-h1", "microbatch_size": 1}, 4, "float32"),
    ("middle pp 2 recompute bf16", MIDDLE, {"pp": 2, "microbatch_size": 1, "recompute": "full"}, 8, "bf16"),
    ("small dp 2", SMALL, {"dp": 2, "microbatch_size": 2}, 4, "float32"),
    ("middle dp 2", MIDDLE, {"dp": 2, "microbatch_size": 2}, 8, "float32"),
    ("middle dp 2 ZeRO 1 bf16", MIDDLE, {"dp": 2, "zero": 1, "microbatch_size": 2}, 4, "bf16"),
    ("middle dp 2 ZeRO 2", MIDDLE, {"dp": 2, "zero": 2, "microbatch_size": 1}, 2, "float32"),
    ("small dp 2 ZeRO 3", SMALL, {"dp": 2, "zero": 3, "microbatch_size": 4}, 16, "float32"),
    ("large dp 2 ZeRO 3 bf16", LARGE, {"dp": 2, "zero": 3, "microbatch_size": 2}, 4, "bf16"),
    ("middle cp 2", MIDDLE, {"cp": 2, "microbatch_size": 2}, 2, "float32"),
    ("gpt cp 2 all-gather bf16", GPT, {"cp": 2, "cp_method": "all-gather", "microbatch_size": 2}, 2, "bf16"),
)

LEAST_STEPS, MOST_STEPS = 6, 40
QUIETEST = 4  # of so many steps one counts


def job_of(plan: Plan, device: str) -> JobSpec:
    """A plan as a job on a device."""
    name, model, degrees, batch, number = plan
    return make_job(
        {
            "name": name.replace(" ", "-").replace(",", ""), "model": model, "plan": degrees,
            "batch": {"global_batch_size": batch}, "precision": {"compute": number}, "run": {"device": "cpu"},
            "cluster": {"device": device},
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of a rank: its seconds, those in which the rank's process had a processor, and those of all processes of
    the machine."""

    wall_s: float
    own_s: float
    all_s: float


def busy_s() -> float:
    """Seconds that all processors of this machine have worked, since it was started."""
    columns = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    return (sum(map(int, columns[:3])) + sum(map(int, columns[5:8]))) / os.sysconf("SC_CLK_TCK")


def time_steps(most_s: float, job: JobSpec, mesh: Mesh, folder: Path) -> list[Step]:
    """Every rank calls this: steps as `train` makes them."""
    replica = build(job, mesh)
    shape = (job.batch.global_batch_size // job.plan.dp, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape)
    results: list[Step] = []
    begin_s = time.perf_counter()
    goes_on = True
    while len(results) < LEAST_STEPS or goes_on:
        barrier(mesh.world)
        start_s, own_s, all_s = time.perf_counter(), time.process_time(), busy_s()
        train_step(replica, len(results), tokens_BS=tokens_BS)
        results.append(Step(time.perf_counter() - start_s, time.process_time() - own_s, busy_s() - all_s))
        measure_shares(mesh, 1.0)
        mesh.ledger.clear()
        spent = torch.tensor([time.perf_counter() - begin_s])
        goes_on = float(all_reduce_max(spent, mesh.world)) < most_s and len(results) < MOST_STEPS
    return results[2:]


def quietest(ranks: list[list[Step]]) -> tuple[list[float], float]:
    """(seconds of the steps in which other programs took least of the processors, the share that they took there)."""
    results = []
    for of_ranks in zip(*ranks, strict=True):
        wall_s = max(step.wall_s for step in of_ranks)
        others_s = max(0.0, of_ranks[0].all_s - sum(step.own_s for step in of_ranks))
        results.append((others_s / wall_s / (os.cpu_count() or 1), wall_s))
    chosen = sorted(results)[: max(3, len(results) // QUIETEST)]
    return [wall_s for _, wall_s in chosen], statistics.median(share for share, _ in chosen)


def ranks_of(values: list[float]) -> np.ndarray:
    """The place of each value among all."""
    return np.argsort(np.argsort(values))


def main() -> None:
    """Calibrate, or take a file; predict and run each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="a file of `shardwright calibrate`; without one this calibrates first")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between plans")
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    parser.add_argument("--most", type=float, default=4.0, help="seconds of steps of a plan")
    parser.add_argument("--parts", action="store_true", help="also where the predicted time goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        device = options.device
        if device is None:
            device = str(Path(folder, "calibrated.toml"))
            write_device(Path(device), calibrate_here(Sweep(), min(2, ranks_here()), "cpu")[0])
        print("| plan | parameters | predicted (s) | measured (s) | others took | error |\n|---|---|---|---|---|---|")
        printed, took = [], []
        for number, plan in enumerate(PLANS):
            if options.only not in plan[0]:
                continue
            job = job_of(plan, device)
            result = estimate(job).step
            predicted_s = float(result.total)
            ranks = launch(partial(time_steps, options.most), job, Path(folder, str(number)))
            steps_s, others = quietest(ranks)
            measured_s = statistics.median(steps_s)
            printed.append(predicted_s)
            took.append(measured_s)
            millions = num_parameters(job.model) / 1e6
            print(
                f"| {plan[0]} | {millions:.0f} M | {predicted_s:.3f} | {measured_s:.3f} | {others:.0%} | "
                f"{predicted_s / measured_s - 1:+.1%} |", flush=True,
            )  # fmt: skip
            if options.parts:
                parts = {part: f"{1e3 * value:.1f}" for part, value in vars(result).items() if value > 1e-4}
                print(f"    {parts}", file=sys.stderr)
            time.sleep(options.pause)
    errors = [abs(p / t - 1) for p, t in zip(printed, took, strict=True)]
    spearman = np.corrcoef(ranks_of(printed), ranks_of(took))[0, 1] if len(printed) > 1 else 1.0
    print(f"\nMedian of the absolute error: {statistics.median(errors):.1%}; largest: {max(errors):.1%}.")
    print(f"Spearman's correlation of predicted and measured: {spearman:.3f}.")


if __name__ == "__main__":
    main()
