"""Drawn plans under the checks of `shardwright dryrun --check`: messages, calls of kernels, accesses to memory, waits.
Each fifth is of a module of the user's own, under the checks of accesses and waits.

python tests/fuzz/checks.py --seed 1 --count 300
"""

import argparse
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.draw import draw
from shardwright.config.base import PlanError
from shardwright.config.load import make_job
from shardwright.measure.checks.plan_checks import check_plan
from shardwright.memory.budget import meet_budget
from shardwright.schedule.job_program import plan_faults
from shardwright.train.own_module.module_job import module_job
from support.module_accesses import module_accesses


def faults_of(seed: int, number: int) -> list[str] | None:
    """The faults of a draw; None where the job itself is refused."""
    try:
        job = meet_budget(make_job(draw(seed, number)))
    except PlanError:
        return None
    if plan_faults(job):
        return None
    return [f"{check.name}: {fault}" for check in check_plan(job) for fault in check.faults]


def module_faults(seed: int, number: int) -> list[str]:
    """The faults of a draw of a module of the user's own, of a plan for it, and of its numbers."""
    rng = random.Random(f"modules {seed} {number}")
    zero, width = rng.randint(0, 3), rng.choice([3, 8, 17])
    plan: dict[str, Any] = {"zero": zero, "bucket_mib": rng.choice([0.001, 1.0, 25.0])}
    if zero:
        plan["offload_optimizer"] = rng.choice([0.0, 0.5, 1.0])
    if zero == 3:
        plan["offload_parameters"] = plan["offload_optimizer"] == 1.0 and rng.random() < 0.5
    if zero == 0 and rng.random() < 0.5:
        plan["compress"] = rng.choice(["topk", "powersgd"])
    given = {
        "optimizer": {"name": rng.choice(["adamw", "sgd", "lion"])},
        "precision": {"compute": rng.choice(["float32", "bf16"])},
    }
    try:
        job = module_job(plan, given["optimizer"], given["precision"], rng.choice([1, 2, 4, 8]))
    except PlanError as error:
        return [f"{plan} is refused: {error}"]
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(rng.randint(1, 4))
        ]
        module = nn.Sequential(nn.Embedding(50, width), *layers)
    accumulate = rng.randint(1, 3)
    inputs = partial(torch.zeros, rng.randint(1, 3), 6, dtype=torch.long, device="meta")
    ran = module_accesses(job, module, inputs, accumulate, rng.randrange(job.plan.world))
    waits = [line for line in ran.waits if not line.startswith("parallel/zero/")]
    return [*ran.faults, *([f"the host waits at {waits}, and once would do"] if len(waits) > 1 else [])]


def main() -> int:
    """Check so many draws. 1 if some have faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began_s, results = time.monotonic(), Counter[str]()
    for number in range(options.first, options.first + options.count):
        faults = module_faults(options.seed, number) if number % 5 == 4 else faults_of(options.seed, number)
        results["refused" if faults is None else "wrong" if faults else "right"] += 1
        for fault in faults or []:
            print(f"--seed {options.seed} --first {number} --count 1: {fault}", flush=True)
    print(f"{dict(results)} in {time.monotonic() - began_s:.0f} s")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
