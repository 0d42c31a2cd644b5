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
from overlap import HEADER, MICROBATCHES, MODEL, Contest, chain, compare, enter

from shardwright.parallel.mesh import Mesh, make_mesh
from shardwright.schedule.job import job_program
from shardwright.spec.job import JobSpec

RATES = (800.0, 400.0, 200.0)  # Mbit/s
SEQUENCES = 2  # a microbatch
MOE = {**MODEL, "moe": {"experts": 8, "top_k": 2, "ffn": 352}}
JOBS = {
    "chain": {"model": {"layers": 1, **MOE}, "plan": {"dp": 2, "ep": 2, "microbatch_size": SEQUENCES}},
    "dualpipev": {
        "model": {"layers": 4, **MOE},
        "plan": {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "microbatch_size": SEQUENCES},
    },
}


def benchmark(mesh: Mesh, job: JobSpec, name: str) -> None:
    """All rates of a case on this rank."""
    if name == "chain":  # as in overlap.py
        mesh = make_mesh(job.plan, mesh.rank, mesh.device, 60.0, mesh.watch, side_by_side=True)
    contest = Contest(mesh, job, chain(MICROBATCHES) if name == "chain" else job_program(job), "ep")
    contest.tokens = contest.tokens[:MICROBATCHES]  # a replica's share
    for mine, theirs in zip(contest.outcome(contest.pairs), contest.outcome(contest.split), strict=True):
        assert torch.equal(mine, theirs), "side by side gives other bits than in turn"
    for rate in RATES:
        print_row([f"{name}, {rate:.0f}", *compare(contest, rate)])


def main() -> None:
    """The table."""
    names = sys.argv[1:] or list(JOBS)
    print("| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER), sep="\n", flush=True)
    for name in names:
        job = JOBS[name] | {"batch": {"global_batch_size": 2 * MICROBATCHES * SEQUENCES}}
        world = 4 if name == "dualpipev" else 2
        with links(world) as made:
            run_ranks(partial(benchmark, name=name), job, world, partial(enter, of=made))


if __name__ == "__main__":
    try:
        main()
    except NoLinksError as error:
        sys.exit(f"moe_overlap.py can't shape links here: {error}")
