"""What overlapped pairs hide of the all-to-all of experts: DualPipeV, pp 2 x ep 2, pairs against the same without.

    sudo .venv/bin/python benchmarks/moe_overlap.py

Figures are those of overlap.py, with ep in place of tp: e is how long a rank stands still for the all-to-alls of a pair
that run one part after the other. Each rank has its own 512 tokens a microbatch, which send 2 rows each to 8 experts.
"""

import sys
from functools import partial

import torch
from alternate import print_row, run_ranks
from links import NoLinksError, links
from overlap import HEADER, MICROBATCHES, MODEL, Contest, compare, enter

from shardwright.parallel.mesh import Mesh
from shardwright.schedule.job import job_program
from shardwright.spec.job import JobSpec

RATES = (800.0, 400.0, 200.0)  # Mbit/s
SEQUENCES = 2  # a microbatch
JOB = {
    "model": {"layers": 4, **MODEL, "moe": {"experts": 8, "top_k": 2, "ffn": 352}},
    "plan": {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "microbatch_size": SEQUENCES},
    "batch": {"global_batch_size": 2 * MICROBATCHES * SEQUENCES},
}


def benchmark(mesh: Mesh, job: JobSpec, rates: tuple[float, ...]) -> None:
    """All rates on this rank."""
    contest = Contest(mesh, job, job_program(job), "ep")
    contest.tokens = contest.tokens[:MICROBATCHES]
    for mine, theirs in zip(contest.outcome(contest.pairs), contest.outcome(contest.split), strict=True):
        assert torch.equal(mine, theirs), "side by side gives other bits than in turn"
    for rate in rates:
        print_row([f"dualpipev, {rate:.0f}", *compare(contest, rate)])


def main() -> None:
    """The table."""
    rates = tuple(map(float, sys.argv[1:])) or RATES
    print("| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER), sep="\n", flush=True)
    with links(4) as made:
        run_ranks(partial(benchmark, rates=rates), JOB, 4, partial(enter, of=made))


if __name__ == "__main__":
    try:
        main()
    except NoLinksError as error:
        sys.exit(f"moe_overlap.py can't shape links here: {error}")
