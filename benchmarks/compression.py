"""Loss against bytes: the quickstart's model on two replicas, under each compression of the gradients.

    .venv/bin/python benchmarks/compression.py --set optimizer.steps=300 --svg benchmarks/compression.svg

Every method sees the same samples from the same initial weights. Bytes are those that one rank puts on the wire for
gradients (half of what both do), as predicted. Prints a table and draws the curves.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from alternate import print_row, resized, run_two_ranks
from curves import Curve, curves_picture

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.compression import reduced_bucket, wire_bytes
from shardwright.train.build import build
from shardwright.train.data.batch_reader import my_share
from shardwright.train.data.prepare import TokenFiles, prepare_tokens
from shardwright.train.held_out import held_out_loss
from shardwright.train.train_step import train_step

BASE = [
    "plan.dp=2", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false", "plan.microbatch_size=8",
    "batch.global_batch_size=16", "optimizer.steps=300",
]  # fmt: skip
METHODS = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "powersgd, rank 4": {"compress": "powersgd", "compress_rank": 4},
    "topk, 1 %": {"compress": "topk", "compress_share": 0.01},
    "topk, 0.1 %": {"compress": "topk", "compress_share": 0.001},
}
SMOOTHED = 10  # steps whose mean loss is a point of a curve


@dataclass(frozen=True)
class Run:
    """One method: mean loss of each step, the held-out loss, and what one rank put on the wire in a step."""

    losses: list[float]
    held_out: float
    bytes_a_step: float


def train(job: JobSpec, mesh: Mesh, tokens: TokenFiles) -> Run:
    """Train from the initial weights to the last step."""
    replica = build(job, mesh)
    samples, held_out = tokens.train_samples(), tokens.validation_samples()
    assert held_out is not None, "a comparison needs held-out text"
    batch, losses = job.batch.global_batch_size, []
    for step in range(job.optimizer.steps):
        losses.append(train_step(replica, step, my_share(samples, step * batch, job, mesh)).loss)
    places = [p.place for p in placed_parameters(replica.stages[0]).values()]
    sent = wire_bytes(reduced_bucket(job.plan, places, mesh.dp.size), mesh.dp.size)
    return Run(losses, held_out_loss(replica, held_out), sent / mesh.dp.size)


def compare(mesh: Mesh, job: JobSpec, svg: Path | None) -> None:
    """All methods on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(job.data, job.model, job.run.seed, Path(folder))
        header = ["method", "last loss", "held-out loss", "KB a step", "less"]
        print_row(header, is_header=True)
        curves, plain = [], 0.0
        for name, fields in METHODS.items():
            run = train(resized(job, plan=fields), mesh, tokens)
            plain = plain or run.bytes_a_step
            points = [
                (run.bytes_a_step * (i + SMOOTHED) / 1e6, statistics.mean(run.losses[i : i + SMOOTHED]))
                for i in range(0, len(run.losses) - SMOOTHED + 1, SMOOTHED)
            ]
            curves.append(Curve(name, points))
            print_row([
                name, f"{points[-1][1]:.3f}", f"{run.held_out:.3f}", f"{run.bytes_a_step / 1e3:,.1f}",
                f"{plain / run.bytes_a_step:.1f} x",
            ])  # fmt: skip
        barrier(mesh.world)
    if svg is not None and mesh.rank == 0:
        title = f"Training loss against bytes, {job.model.name}, {job.optimizer.steps} steps on {mesh.dp.size} replicas"
        svg.write_text(curves_picture(title, "MB that one rank sent", "loss", curves), encoding="utf-8")


def main() -> None:
    """Read the arguments and start two ranks."""
    parser = argparse.ArgumentParser(description="Loss against bytes under each compression of the gradients.")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="change the job")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    job = load_job("quickstart", [*BASE, *arguments.set])
    if (job.plan.world, job.plan.dp) != (2, 2) or job.optimizer.steps < SMOOTHED:
        parser.error(f"this compares on plan.dp = 2 and nothing else, over {SMOOTHED} steps or more")
    run_two_ranks(partial(compare, svg=arguments.svg), job.model_dump())


if __name__ == "__main__":
    main()
