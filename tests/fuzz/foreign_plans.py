"""Plans to other systems and back: each that a system has must be the same plan afterwards.

python tests/fuzz/foreign_plans.py --seed 1 --count 100
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from interchange.drawn_jobs import jobs_of
from shardwright.config.base import PlanError
from shardwright.interchange.exported import exported
from shardwright.interchange.system import SYSTEMS
from shardwright.report.toml_files import job_toml


def main() -> int:
    """Write so many plans for each system. 1 if one does not come back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    for system in SYSTEMS.values():
        for job in jobs_of(system, options.seed, options.count):
            try:
                exported(system, job)
            except PlanError as error:
                print(f"{error}\n{job_toml(job)}")
                return 1
        print(f"{system.name}: {options.count} plans there and back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
