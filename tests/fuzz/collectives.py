"""Draws jobs at random and holds the account of a rank's collectives against its dry run, on either kind of device.

    python tests/fuzz/collectives.py --seed 1 --count 1000

Calls and bytes by kind and axis must be equal. Rows to experts are in both as even as they can be; what a gate chooses
is another matter, which real ranks tell (plans.py).
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fuzz.draw import draw
from fuzz.ledgers import account_of, differences, dry_ledger
from fuzz.plans import accepted, as_command
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec

DEVICES = ("cpu", "cuda")


def jobs(seed: int, numbers: range, most_passes: int = 10**6) -> Iterator[tuple[int, JobSpec]]:
    """The draws that are jobs, with their numbers, but those with more passes of a microbatch through a layer."""
    for number in numbers:
        try:
            job = accepted(draw(seed, number))
        except PlanError:
            continue
        if job.num_microbatches * job.model.layers <= most_passes:
            yield number, job


def drawn_rank(number: int, job: JobSpec) -> int:
    """Any rank."""
    return number * 7 % job.plan.world


def wrong(job: JobSpec, rank: int, device: str) -> list[str]:
    """Differences of a rank's account from its dry run."""
    run, program = dry_ledger(job, rank, device)
    return differences(account_of(job, program, rank), run)


def main() -> int:
    """Compare; 0 if all are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws")
    parser.add_argument("--count", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    start_s = time.monotonic()
    for number, job in jobs(options.seed, range(options.first, options.first + options.count)):
        for device in DEVICES:
            result = wrong(job, rank := drawn_rank(number, job), device)
            counts["differ" if result else "equal"] += 1
            if result:
                print(f"draw {options.seed}:{number}, rank {rank} as on {device}", *result, sep="\n  ")
                print(as_command(draw(options.seed, number)), flush=True)
    print(f"{dict(counts)} of {options.count} draws on {len(DEVICES)} devices; {time.monotonic() - start_s:.0f} s")
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
