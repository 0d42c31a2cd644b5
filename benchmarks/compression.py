"""Loss against bytes: the quickstart's model on two replicas, under each compression of the gradients.

    .venv/bin/python benchmarks/compression.py --set optimizer.steps=300 --svg benchmarks/compression.svg

Every method sees the same samples from the same initial weights. The loop is plain data parallelism with one bucket:
backward, one reduction a step, clipping, AdamW. Bytes are those that one rank puts on the wire for gradients (half of
what both do), as predicted; the compressor's own account is checked against it. Prints a table and draws the curves.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from alternate import plain_stage, print_row, resized, run_two_ranks
from curves import Curve, curves_picture
from torch import nn

from shardwright.parallel.collectives import all_reduce, barrier, start_all_reduce
from shardwright.parallel.compress.choose import make_compressor
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import placed_parameters
from shardwright.spec.job import JobSpec
from shardwright.spec.load import load_job
from shardwright.spec.plan import PlanSpec
from shardwright.train.data import TokenFiles, prepare_tokens
from shardwright.train.optimizer import learning_rate, make_adamw
from shardwright.train.step import apply_update
from shardwright.train.trainer import my_share
from shardwright.workload.compress import reduced_bucket, wire_bytes

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
    """One method: mean loss of each step, the held-out loss, and what a reduction cost one rank."""

    losses: list[float]
    held_out: float
    bytes_a_step: float
    cpu_ms: float


def train(job: JobSpec, mesh: Mesh, tokens: TokenFiles) -> Run:
    """Train from the initial weights to the last step."""
    decoder = plain_stage(job)
    parameters = list(placed_parameters(decoder).values())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = make_adamw(job.optimizer, parameters)
    make = make_compressor(job.plan)
    compressor = make() if make else None
    samples, held_out = tokens.train_samples(), tokens.validation_samples()
    assert held_out is not None, "a comparison needs held-out text"
    losses, cpu_s = [], []
    for step in range(job.optimizer.steps):
        flat.zero_()
        total = torch.zeros(())
        for part_BS in my_share(samples, step * job.batch.global_batch_size, job, mesh).split(job.plan.microbatch_size):
            loss = decoder(part_BS[:, :-1], part_BS[:, 1:]).mean()
            loss.backward()
            total += loss.detach()
        start_s = time.process_time()
        reduction = compressor.start(flat, gradients, mesh.dp) if compressor else start_all_reduce(flat, mesh.dp)
        reduction.wait()
        cpu_s.append(time.process_time() - start_s)
        flat.mul_(1.0 / (job.num_microbatches * mesh.dp.size))
        nn.utils.clip_grad_norm_(parameters, job.optimizer.clip_grad_norm)
        apply_update(optimizer, learning_rate(job.optimizer, step))
        losses.append(all_reduce(total, mesh.dp).item() / (job.num_microbatches * mesh.dp.size))

    shapes = [tuple(p.shape) for p in parameters]
    sent, plain = (
        wire_bytes(reduced_bucket(plan, shapes, mesh.dp.size), mesh.dp.size) for plan in (job.plan, PlanSpec())
    )
    if compressor is not None:
        assert compressor.bytes_saved == job.optimizer.steps * (plain - sent)
    with torch.no_grad():
        total = torch.zeros(())
        for i in range(job.run.eval_batches):
            tokens_BS = my_share(held_out, i * job.batch.global_batch_size, job, mesh)
            total += decoder(tokens_BS[:, :-1], tokens_BS[:, 1:]).mean()
    mean = all_reduce(total, mesh.dp).item() / (job.run.eval_batches * mesh.dp.size)
    return Run(losses, mean, sent / mesh.dp.size, 1e3 * statistics.median(cpu_s))


def compare(mesh: Mesh, job: JobSpec, svg: Path | None) -> None:
    """All methods on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(job.data, job.model, job.run.seed, Path(folder))
        header = ["method", "last loss", "held-out loss", "KB a step", "less", "reduction, processor ms"]
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
                f"{plain / run.bytes_a_step:.1f} x", f"{run.cpu_ms:.1f}",
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
