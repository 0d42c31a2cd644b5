"""Does the plan that `plan` recommends fit? Its memory as `plan` tells it, the account, and the peak of a dry run.

    python benchmarks/plans_fit.py              # the cases below and every job of the catalog: half an hour
    python benchmarks/plans_fit.py 0 3 yi-34b   # some of them

A line for each. The exit status is 1 where the account and the dry run of the fullest rank are more than 3 % apart, or
more is needed than the device offers.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from shardwright.cli.checked_job import load_to_plan
from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.units import GIB
from shardwright.cost.calibration import device_of, shipped
from shardwright.measure.dryrun import dry_run
from shardwright.memory.job_memory import job_memory
from shardwright.planner.advice.priced_plan import PricedPlan
from shardwright.planner.advice.recommendation import plans_of
from shardwright.planner.search.constraints import Constraints
from shardwright.report.plans_text import plan_words
from shardwright.sharding.mesh import MeshShape

MOST_APART = 0.03


@dataclass(frozen=True)
class Case:
    """A job or model of the catalog, a cluster in place of its own, and fields."""

    name: str
    asked: AskedCluster = field(default_factory=AskedCluster)
    fields: tuple[str, ...] = ()


def on(name: str, devices: int, device: str, *fields: str) -> Case:
    """A model on a cluster."""
    return Case(name, AskedCluster(devices=devices, device=device), fields)


CASES = (
    on("llama3-8b", 8, "h100-sxm"),
    on("llama3-8b", 16, "a100-pcie-40g", "cluster.inter_node.bandwidth_gb_per_s=12.5"),
    on("llama3-70b", 64, "h100-sxm"),
    on("mixtral-8x7b", 32, "h100-sxm"),
    on("qwen2.5-72b", 128, "h100-sxm", "model.sequence=131072", "batch.global_batch_size=32"),
    on("deepseek-v3", 512, "h800-sxm"),
    *(Case(name) for name in catalog.names("jobs")),
)


def first_rank(job: JobSpec, stage_rank: int) -> int:
    """A rank at a place in the pipeline."""
    shape = MeshShape.of(job.plan)
    return next(rank for rank in range(job.plan.world) if shape.coordinates(rank)["pp"] == stage_rank)


def checked(plan: PricedPlan) -> tuple[str, bool]:
    """The figures of a plan, and whether they are as they should be."""
    memory = job_memory(plan.job)
    fullest = max(range(len(memory)), key=lambda rank: memory[rank].total_bytes)
    run = dry_run(plan.job, first_rank(plan.job, fullest), "cuda")
    room = device_of(plan.job.cluster.device).room_bytes
    answer, account, peak = float(plan.memory.total), memory[fullest].total_bytes, run.peak.total_bytes
    is_right = abs(account / peak - 1) <= MOST_APART and abs(answer / account - 1) <= MOST_APART and account <= room
    sizes = f"plan {answer / GIB:.1f}, account {account / GIB:.1f}, dry run {peak / GIB:.1f} of {room / GIB:.1f} GiB"
    return f"{plan_words(plan.job.plan)}: {sizes}, {float(plan.time.total):.3f} s, MFU {plan.time.mfu:.1%}", is_right


def main(chosen: list[str]) -> int:
    """Check the cases that are chosen, by number or name; all of them if none is."""
    all_right = True
    for number, case in enumerate(CASES):
        if chosen and not {str(number), case.name} & set(chosen):
            continue
        began_s = time.perf_counter()
        where: Any = f"{case.asked.devices} x {case.asked.device}" if case.asked.devices else "its cluster"
        try:
            result = plans_of(load_to_plan(case.name, case.fields, case.asked).job, Constraints(), shipped())
        except (PlanError, KeyError) as error:
            print(f"{number} {case.name} on {where}: {error}", flush=True)
            continue
        if result.recommendation is None:
            print(f"{number} {case.name} on {where}: no plan fits", flush=True)
            continue
        text, is_right = checked(result.recommendation.plan)
        all_right &= is_right
        took_s = time.perf_counter() - began_s
        print(f"{number} {case.name} on {where}: {text}{'' if is_right else ' WRONG'}, in {took_s:.0f} s", flush=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
