"""How evenly experts are used: each gate with the rule that balances it, and without.

    python benchmarks/balance.py --svg docs/experts.svg

One small model on the standard library, the same samples, weights and schedule for all; steps are those of a training
run (train/step.py) on one rank. Prints the table of docs/experts.md and draws its picture. The load of an expert is how
often it was chosen in a step, before room in experts was looked at; what is shown is that of the busiest expert of the
layer that is least even, as a multiple of the mean.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from curves import Curve, curves_picture

from shardwright.spec.job import JobSpec
from shardwright.spec.load import make_job
from shardwright.train.build import build, job_mesh
from shardwright.train.data import TokenFiles, prepare_tokens
from shardwright.train.step import train_step
from shardwright.train.trainer import held_out_loss, my_share

JOB: dict[str, Any] = {
    "model": {"name": "two layers", "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "sequence": 64},
    "plan": {"microbatch_size": 16},
    "batch": {"global_batch_size": 16},
    "optimizer": {"learning_rate": 2e-3, "steps": 500},
    "run": {"eval_batches": 32},
}
EXPERTS: dict[str, Any] = {"experts": 8, "ffn": 64}
SWITCH_LOSS = {"aux_loss": "switch"}
BIAS = {"bias_update": 0.005}
GROUPS = {"num_groups": 4, "groups_kept": 2}
# By gate: what chooses, and what balances it. Experts that choose their tokens need no rule.
GATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax, top 2": ({"gate": "softmax"}, SWITCH_LOSS),
    "softmax, loss by sequence": ({"gate": "softmax"}, SWITCH_LOSS | {"aux_scope": "sequence"}),
    "softmax, loss by global batch": ({"gate": "softmax"}, SWITCH_LOSS | {"aux_scope": "global"}),
    "switch": ({"gate": "switch", "capacity_factor": 1.25}, SWITCH_LOSS),
    "gshard": ({"gate": "gshard", "capacity_factor": 2.0}, {"aux_loss": "gshard", "aux_coefficient": 0.1}),
    "sigmoid": ({"gate": "sigmoid"}, BIAS),
    "sigmoid, 2 of 4 groups": ({"gate": "sigmoid", **GROUPS}, BIAS),
    "correlation": ({"gate": "correlation"}, SWITCH_LOSS),
    "expert choice": ({"gate": "expert-choice"}, {}),
}
LAST = 50  # steps whose mean is the last load
SMOOTHED = 10  # steps whose mean is a point of a curve
MOST = 1.5  # what is called even


@dataclass
class Run:
    """What became of one setting, step by step."""

    loads: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    held_out: float = 0.0

    @property
    def last_load(self) -> float:
        """Mean over the last steps."""
        return statistics.mean(self.loads[-LAST:])


def train(job: JobSpec, tokens: TokenFiles) -> Run:
    """Train from the initial weights to the last step."""
    mesh = job_mesh(job, 0, torch.device("cpu"))
    replica = build(job, mesh)
    samples, held_out = tokens.train_samples(), tokens.validation_samples()
    assert held_out is not None, "a comparison needs held-out text"
    run = Run()
    for step in range(job.optimizer.steps):
        result = train_step(job, replica, mesh, step, my_share(samples, step * job.batch.global_batch_size, job, mesh))
        run.loads.append(max(layer.largest_load for layer in result.routing))
        run.dropped.append(statistics.mean(layer.dropped_share for layer in result.routing))
        run.entropies.append(statistics.mean(layer.entropy for layer in result.routing))
    run.held_out = held_out_loss(job, replica, mesh, held_out)
    return run


def points(loads: list[float]) -> list[tuple[float, float]]:
    """The curve of these loads."""
    starts = range(0, len(loads) - SMOOTHED + 1, SMOOTHED)
    return [(first + SMOOTHED, statistics.mean(loads[first : first + SMOOTHED])) for first in starts]


def main() -> None:
    """Train each setting and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=JOB["optimizer"]["steps"])
    parser.add_argument("--gates", default="", help="names of rows, separated by semicolons")
    parser.add_argument("--svg", type=Path, help="where to draw the picture")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = asked.gates.split(";") if asked.gates else list(GATES)
    curves = []
    print("| gate | rule | busiest expert x mean | dropped | entropy, nats | held-out loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        bare_runs: dict[str, Run] = {}
        for name in names:
            gate, rule = GATES[name]
            for balances in (True, False) if rule else (True,):
                moe = EXPERTS | gate | (rule if balances else {})
                job = make_job(
                    JOB | {"model": JOB["model"] | {"moe": moe}, "optimizer": JOB["optimizer"] | {"steps": asked.steps}}
                )
                if not balances and str(gate) in bare_runs:  # another rule for the same gate
                    continue
                tokens = prepare_tokens(job.data, job.model, job.run.seed, Path(folder))
                start_s = time.perf_counter()
                run = train(job, tokens)
                print(f"{name}, {balances}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)
                words = ", ".join(f"{key} {value}" for key, value in rule.items()) if balances else "none"
                print(
                    f"| {name} | {words or 'by construction'} | {run.last_load:.2f} | "
                    f"{statistics.mean(run.dropped[-LAST:]):.1%} | {statistics.mean(run.entropies[-LAST:]):.2f} | "
                    f"{run.held_out:.3f} |",
                    flush=True,
                )
                title = name if balances else f"{name.split(',')[0]}, no rule"
                curves.append(Curve(title, points(run.loads), names.index(name), is_dashed=not balances))
                if not balances:
                    bare_runs[str(gate)] = run
    if asked.svg:
        title = f"Busiest expert as a multiple of the mean, {asked.steps} steps, with a rule and (dashed) without"
        asked.svg.write_text(curves_picture(title, "step", "load of the busiest expert / mean", curves))


if __name__ == "__main__":
    main()
