"""All-to-alls of experts that overlapped pairs hide: DualPipeV, pp 2 x ep 2, pairs against the same without.

    sudo .venv/bin/python benchmarks/moe_overlap.py

Figures are those of overlap.py, with ep in place of tp: e is how long a rank stands still for the all-to-alls of a pair
that run one part after the other. Each rank has its own 512 tokens a microbatch, which send 2 rows each to 8 experts.
"""

import torch
from alternate import print_row
from overlap import MICROBATCHES, MODEL, Contest, chain, compare, print_table

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.schedule.job_program import job_program

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
        mesh = make_mesh(MeshNeeds(job.plan, side_by_side=True), mesh.rank, mesh.device, 60.0, mesh.watch)
    contest = Contest(mesh, job, chain(MICROBATCHES) if name == "chain" else job_program(job), "ep")
    contest.tokens = contest.tokens[:MICROBATCHES]  # a replica's share
    for own, reference in zip(contest.outcome(contest.pairs), contest.outcome(contest.split), strict=True):
        assert torch.equal(own, reference), "side by side gives other bits than in turn"
    for rate in RATES:
        print_row([f"{name}, {rate:.0f}", *compare(contest, rate)])


if __name__ == "__main__":
    print_table(JOBS, 2 * MICROBATCHES * SEQUENCES, benchmark)
