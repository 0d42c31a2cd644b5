"""Bytes that a layer keeps and attention moves over cp, by method and degree: measured on ranks, beside predictions.

    python benchmarks/context.py

Prints the table of docs/context.md. Bytes do not depend on the machine: nothing is timed.
"""

import tempfile
from pathlib import Path

import torch

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.recompute_policy import KEEP_ALL
from shardwright.layers.layer_tensors import ATTENTION
from shardwright.layers.recompute_cost import Again
from shardwright.measure.saved_tensors import saved_bytes
from shardwright.memory.activations import layer_of
from shardwright.memory.kept_tensors import IN_ATTENTION
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build
from shardwright.train.launch.launch import launch

MODEL = {
    "layers": 1, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1408, "sequence": 2048, "vocab": 256,
}  # fmt: skip
IN_CORE = (
    *(IN_ATTENTION.query, IN_ATTENTION.key, IN_ATTENTION.value, IN_ATTENTION.attended_before_trade),
    *(ATTENTION.attended, ATTENTION.log_sum_exp),
)
PLANS = [
    {},
    *({"cp": cp, "cp_method": method} for method in ("ring", "all-gather", "ulysses") for cp in (2, 4)),
    {"cp": 2, "tp": 2, "sequence_parallel": True},
]


def measured(job: JobSpec, mesh: Mesh, folder: Path) -> tuple[int, int, int]:
    """On this rank: bytes that a layer keeps, and that went over cp in its forward, and in its backward."""
    stage = build(job, mesh).stages[0]
    x = stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()
    constants = [*(p.detach() for p in placed_parameters(stage).values()), *stage.tables.tensors]

    def moved() -> int:
        return sum(tally.num_bytes for (_, axis), tally in mesh.ledger.tallies.items() if axis == "cp")

    kept = saved_bytes(lambda: stage.layers["0"](x, stage.forward_pass()), constants)
    mesh.ledger.clear()
    y = stage.layers["0"](x, stage.forward_pass())
    forward = moved()
    y.backward(torch.ones_like(y))
    return kept, forward, moved() - forward


def row(plan: dict[str, object]) -> list[str]:
    """One plan's: predicted and measured."""
    job = make_job({"model": MODEL, "plan": plan, "batch": {"global_batch_size": 1}, "run": {"device": "cpu"}})
    with tempfile.TemporaryDirectory() as folder:
        results = set(launch(measured, job, Path(folder), num_threads=1))
    assert len(results) == 1, "ranks differ"
    ((kept, forward, backward),) = results
    layer = layer_of(job)
    tensors = layer.kept(KEEP_ALL)
    attention = sum(num_bytes for tensor, num_bytes in tensors.items() if tensor in IN_CORE)
    exchanges = [e for operator in Again.of(job).chain for e in operator.forward if e.axis == "cp"]
    # Around a ring a rank passes on the others' parts; the ledger counts full tensors of all else.
    moved = sum(e.size * (job.plan.cp - 1) / job.plan.cp if e.kind == "ring" else e.size for e in exchanges)
    sizes = (attention, layer.kept_bytes(KEEP_ALL), kept, moved, forward, backward)
    method = job.plan.cp_method if job.plan.cp > 1 else "one rank"
    by_tp = ", tp 2 with sequence parallel" if job.plan.tp > 1 else ""
    return [f"{method}{by_tp}", str(job.plan.cp), *(f"{size / 2**20:.3f}" for size in sizes)]


if __name__ == "__main__":
    heading = [
        "method", "cp", "attention keeps, predicted", "layer keeps, predicted", "layer keeps, measured",
        "forward moves, predicted", "forward moves, measured", "backward moves, measured",
    ]  # fmt: skip
    for cells in (heading, ["---"] * len(heading)):
        print("| " + " | ".join(cells) + " |")
    for plan in PLANS:
        print("| " + " | ".join(row(plan)) + " |", flush=True)
