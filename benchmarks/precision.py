"""Loss in each number type: one small model on real text, the same samples, weights and schedule for all.

    python benchmarks/precision.py --svg docs/precision.svg

Prints the table of docs/precision.md and draws its picture. The steps are those of a training run (train/train_step.py)
on one rank. Seconds of each run go to stderr; they compare nothing, for fp8 is emulated on a CPU.

A gradient of a mean over n tokens has elements of the order of 1 / n. A batch as large as those that large models are
trained with can't be computed here, but its gradients can: the loss is multiplied by the share of such a batch that a
step computes, and the factor divided out again before the update. So a microbatch has the activations and gradients
that it would have in the large batch. The share is a power of two: all types but fp16 give the same bits without it.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.precision import PrecisionSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.precision.loss_scale import LossScale
from shardwright.report.svg import LINE_COLOURS, Box, Line, LineChart, document, legend, text
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.data.batch_reader import my_share
from shardwright.train.data.prepare import TokenFiles, prepare_tokens
from shardwright.train.held_out import held_out_loss
from shardwright.train.train_step import train_step

JOB: dict[str, Any] = {
    "model": {"name": "two layers", "layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "sequence": 64},
    "plan": {"microbatch_size": 4},  # four of them, so that gradients add up in their number type
    "batch": {"global_batch_size": 16},
    "optimizer": {"learning_rate": 1e-3, "steps": 300},
    "run": {"eval_batches": 32},
}
LARGE_BATCH_TOKENS = 2**21
SMOOTHED = 10  # steps whose mean loss is a point of a curve
LAST = 20  # steps whose mean is the last loss


@dataclass(frozen=True)
class Setting:
    """A row of the table. `large` is whether gradients are those of the large batch."""

    fields: dict[str, Any]
    large: bool = True


RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
SETTINGS = {
    "float32": Setting({}),
    "bf16": Setting({"compute": "bf16"}),
    "bf16, gradients in bf16": Setting({"compute": "bf16", "gradients": "compute"}),
    "bf16, moments in bf16": Setting({"compute": "bf16", "moments": "bf16"}),
    "fp16, scaled loss": Setting({"compute": "fp16"}),
    "fp16 unscaled": Setting({"compute": "fp16", "loss_scale": 0}),
    "fp16 unscaled, small batch": Setting({"compute": "fp16", "loss_scale": 0}, large=False),
    **{f"fp8, {recipe}": Setting({"compute": "bf16", "float8": recipe}) for recipe in RECIPES},
    **{
        f"fp8, {recipe}, weight gradients too": Setting(
            {"compute": "bf16", "float8": recipe, "float8_weight_gradients": True}
        )
        for recipe in RECIPES
    },
}


@dataclass
class Run:
    """The course of one setting. `zeros` are shares of the gradient's elements that are zero."""

    losses: list[float] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)
    num_skipped: int = 0
    held_out: float = math.nan
    seconds: float = 0.0

    @property
    def last_loss(self) -> float:
        """Mean over the last steps."""
        return statistics.mean(self.losses[-LAST:])


def build_scaled(job: JobSpec, mesh: Mesh, share: float) -> Replica:
    """The job's replica, whose loss is multiplied by `share`, and by the job's own loss scale if it has one."""
    precision = job.precision
    if precision.scales_loss:
        scaling = LossScale(share * precision.loss_scale, precision.loss_scale_growth_steps)
    else:
        scaling = LossScale(share, growth_steps=0)
    return replace(build(job, mesh), loss_scale=scaling)


def zero_share(replica: Replica) -> float:
    """Share of the elements of the last step's gradient that are zero."""
    gradients = [unit.summed_gradients() for shards in replica.shards.values() for unit in shards.units]
    return sum(int((g == 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)


def train(job: JobSpec, tokens: TokenFiles, share: float) -> Run:
    """Train from the initial weights to the last step, or to the first loss that is no number."""
    mesh = job_mesh(job, 0, torch.device("cpu"))
    replica = build_scaled(job, mesh, share)
    samples, held_out = tokens.train_samples(), tokens.validation_samples()
    assert held_out is not None, "a comparison needs held-out text"
    run, start_s = Run(), time.perf_counter()
    for step in range(job.optimizer.steps):
        result = train_step(replica, step, my_share(samples, step * job.batch.global_batch_size, job, mesh))
        run.losses.append(result.loss)
        run.zeros.append(zero_share(replica))
        run.num_skipped += result.skipped
        if not math.isfinite(result.loss):
            return run
    run.held_out = held_out_loss(replica, held_out)
    run.seconds = time.perf_counter() - start_s
    return run


def points(losses: list[float]) -> list[tuple[float, float]]:
    """The curve of these losses."""
    starts = range(0, len(losses) - SMOOTHED + 1, SMOOTHED)
    return [(first + SMOOTHED, statistics.mean(losses[first : first + SMOOTHED])) for first in starts]


# Panels of the picture: differences from float32, which one picture of all losses would hide. Settings by short names.
PANELS = {
    "bf16 and fp16": {
        "bf16": "bf16",
        "gradients in bf16": "bf16, gradients in bf16",
        "moments in bf16": "bf16, moments in bf16",
        "fp16": "fp16, scaled loss",
        "fp16 unscaled, small batch": "fp16 unscaled, small batch",
    },
    "fp8": {recipe: f"fp8, {recipe}" for recipe in RECIPES},
    "fp8, weight gradients too": {recipe: f"fp8, {recipe}, weight gradients too" for recipe in RECIPES},
}
WIDTH, LEFT, GAP, HIGH, ROW = 920.0, 66.0, 86.0, 170.0, 284.0


def types_picture(title: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """Losses in float32 and in fp16 without a loss scale, and differences of all others from float32."""
    wide = (WIDTH - LEFT - GAP - 24) / 2
    boxes = [Box(LEFT + n % 2 * (wide + GAP), 98 + n // 2 * ROW, wide, HIGH) for n in range(4)]
    names = ("float32", "fp16 unscaled")
    lines = [Line(name, curves[name], colour) for name, colour in zip(names, LINE_COLOURS, strict=False)]
    parts = [text(20, 30, title, "name", 15), text(20, 49, f"each point is the mean of {SMOOTHED} steps", size=12)]
    parts += panel(LineChart("loss, nats a token", boxes[0], lines, 0.0))
    exact = dict(curves["float32"])
    for box, (heading, settings) in zip(boxes[1:], PANELS.items(), strict=True):
        lines = [
            Line(name, [(step, 100 * (loss / exact[step] - 1)) for step, loss in curves[setting]], colour)
            for (name, setting), colour in zip(settings.items(), LINE_COLOURS, strict=False)
        ]
        most = max(abs(y) for line in lines for _, y in line.points)
        parts += panel(LineChart(f"{heading}: above float32 by", box, lines, most, 0.0, "{:g} %".format, least=-most))
    return document(title, WIDTH, boxes[-1].bottom + 76, parts)


def panel(chart: LineChart) -> list[str]:
    """A chart with its lines' names below it."""
    box = chart.box
    rows = [chart.lines[:3], chart.lines[3:]]
    legends = [part for n, row in enumerate(rows) for part in legend(box.left, box.bottom + 50 + 16 * n, row)]
    return [*chart.drawn(), text(box.right, box.bottom + 30, "step", anchor="end"), *legends]


def cells(name: str, run: Run, exact: Run) -> list[str]:
    """A row of the table."""
    return [
        name,
        f"{run.last_loss:.3f}",
        f"{run.last_loss / exact.last_loss - 1:+.1%}",
        f"{run.held_out:.3f}",
        f"{run.held_out / exact.held_out - 1:+.1%}",
        f"{statistics.mean(run.zeros[-LAST:]):.0%}",
        str(run.num_skipped),
    ]


def main() -> None:
    """Read the arguments and train once in each setting."""
    parser = argparse.ArgumentParser(description="Loss in each number type.")
    parser.add_argument("--steps", type=int, default=JOB["optimizer"]["steps"], help="training steps of each run")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    if arguments.steps < LAST:
        parser.error(f"the last loss is the mean of {LAST} steps: use as many or more")
    torch.set_num_threads(1)
    job = make_job(JOB | {"optimizer": JOB["optimizer"] | {"steps": arguments.steps}})
    header = ["numbers", "last loss", "against float32", "held-out loss", "against float32", "zeros", "skipped steps"]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header), flush=True)
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(job.data, job.model, job.run.seed, Path(folder))
        for name, setting in SETTINGS.items():
            share = job.tokens_per_step / LARGE_BATCH_TOKENS if setting.large else 1.0
            variant = job.model_copy(update={"precision": PrecisionSpec(**setting.fields)})
            runs[name] = train(variant, tokens, share)
            print("| " + " | ".join(cells(name, runs[name], runs["float32"])) + " |", flush=True)
            print(f"{name}: {runs[name].seconds:.0f} s", file=sys.stderr, flush=True)
    if arguments.svg is not None:
        title = f"Training loss by number type, {job.model.name} of hidden {job.model.hidden}, {arguments.steps} steps"
        curves = {name: points(run.losses) for name, run in runs.items()}
        arguments.svg.write_text(types_picture(title, curves), encoding="utf-8")


if __name__ == "__main__":
    main()
