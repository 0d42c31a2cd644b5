"""Drawn plans under the checks of `shardwright dryrun --check`: messages, calls of kernels, accesses to memory, waits.

python tests/fuzz/checks.py --seed 1 --count 300
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.draw import draw
from shardwright.account.budget import meet_budget
from shardwright.config.base import PlanError
from shardwright.config.load import make_job
from shardwright.measure.checks.plan_checks import check_plan
from shardwright.schedule.job_program import plan_faults


def faults_of(seed: int, number: int) -> list[str] | None:
    """The faults of a draw; None where the job itself is refused."""
    try:
        job = meet_budget(make_job(draw(seed, number)))
    except PlanError:
        return None
    if plan_faults(job):
        return None
    return [f"{check.name}: {fault}" for check in check_plan(job) for fault in check.faults]


def main() -> int:
    """Check so many draws. 1 if some have faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began_s, results = time.monotonic(), Counter[str]()
    for number in range(options.first, options.first + options.count):
        faults = faults_of(options.seed, number)
        results["refused" if faults is None else "wrong" if faults else "right"] += 1
        for fault in faults or []:
            print(f"--seed {options.seed} --first {number} --count 1: {fault}", flush=True)
    print(f"{dict(results)} in {time.monotonic() - began_s:.0f} s")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
