"""How evenly experts are used: each gate with the rules that balance it, and without.

    python benchmarks/balance.py --runs balance.json --svg docs/experts.svg
    python benchmarks/balance.py --from balance.json --svg docs/experts.svg

One small model on the standard library, the same samples, weights and schedule for all; steps are those of a training
run (train/train_step.py) on one rank. Prints the table of docs/experts.md and draws its picture; the second command
does so from the runs that the first one wrote. The load of an expert is how often it was chosen in a step, before room
in experts was looked at; what is shown is that of the busiest expert of the layer that is least even, as a multiple of
the mean.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from balance_picture import Panel, balance_picture

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.train.build import build, job_mesh
from shardwright.train.data.batch_reader import my_share
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.held_out import held_out_loss
from shardwright.train.train_step import train_step

JOB: dict[str, Any] = {
    "model": {"name": "two layers", "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "sequence": 64},
    "plan": {"microbatch_size": 16},
    "batch": {"global_batch_size": 16},
    "optimizer": {"learning_rate": 2e-3, "steps": 800},
    "run": {"eval_batches": 16},
}
NUM_EXPERTS = 8
EXPERTS: dict[str, Any] = {"experts": NUM_EXPERTS, "ffn": 64}
# A loss of 5 % where use is even. GShard's loss is 1/E sum f P where that of Switch is E sum f P (model/balance.py), so
# the same weight is a coefficient E^2 times as large.
SWITCH_LOSS = {"aux_loss": "switch", "aux_coefficient": 0.05}
GSHARD_LOSS = {"aux_loss": "gshard", "aux_coefficient": 0.05 * NUM_EXPERTS**2}
BIAS = {"bias_update": 0.005}
BY_MICROBATCH, NO_RULE, NO_NEED = "Switch's loss, by microbatch", "none", "none needed"


@dataclass(frozen=True)
class Setting:
    """A gate, and by name the rules that may balance it. Experts that choose their tokens need no rule."""

    gate: dict[str, Any]
    rules: dict[str, dict[str, Any]]


SETTINGS = {
    "softmax, top 2": Setting(
        {"gate": "softmax"},
        {
            BY_MICROBATCH: SWITCH_LOSS,
            "Switch's loss, by sequence": SWITCH_LOSS | {"aux_scope": "sequence"},
            "Switch's loss, by global batch": SWITCH_LOSS | {"aux_scope": "global"},
        },
    ),
    "switch, room 1.25": Setting({"gate": "switch", "capacity_factor": 1.25}, {BY_MICROBATCH: SWITCH_LOSS}),
    "gshard, room 2": Setting(
        {"gate": "gshard", "capacity_factor": 2.0}, {"GShard's loss": GSHARD_LOSS, BY_MICROBATCH: SWITCH_LOSS}
    ),
    "sigmoid, top 2": Setting({"gate": "sigmoid"}, {"bias": BIAS}),
    "sigmoid, 2 of 4 groups": Setting({"gate": "sigmoid", "num_groups": 4, "groups_kept": 2}, {"bias": BIAS}),
    "biased softmax, top 2": Setting({"gate": "biased-softmax"}, {"bias": BIAS}),
    "correlation, top 2": Setting({"gate": "correlation"}, {BY_MICROBATCH: SWITCH_LOSS}),
    "expert choice": Setting({"gate": "expert-choice"}, {}),
}
LAST = 50  # steps whose mean is the last load
SMOOTHED = 10  # steps whose mean is a point of a curve
MOST = 1.5  # what is called even


@dataclass
class Run:
    """The course of one setting, step by step."""

    gate: str
    rule: str
    loads: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    unserved: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    held_out: float = 0.0

    def row(self) -> str:
        """Its line of the table, of means over the last steps."""
        load, dropped, unserved, entropy = (
            statistics.mean(values[-LAST:]) for values in (self.loads, self.dropped, self.unserved, self.entropies)
        )
        return (
            f"| {self.gate} | {self.rule} | {load:.2f} | {dropped:.1%} | {unserved:.1%} | {entropy:.2f} | "
            f"{self.held_out:.3f} |"
        )


HEADER = (
    "| gate | balanced by | busiest expert x mean | choices dropped | tokens unserved | entropy, nats | "
    "held-out loss |\n| --- | --- | --- | --- | --- | --- | --- |"
)


def train(job: JobSpec, gate: str, rule: str, folder: Path) -> Run:
    """Train from the initial weights to the last step."""
    tokens = prepare_tokens(job.data, job.model, job.run.seed, folder)
    mesh = job_mesh(job, 0, torch.device("cpu"))
    replica = build(job, mesh)
    samples, held_out = tokens.train_samples(), tokens.validation_samples()
    assert held_out is not None, "a comparison needs held-out text"
    run = Run(gate, rule)
    for step in range(job.optimizer.steps):
        result = train_step(replica, step, my_share(samples, step * job.batch.global_batch_size, job, mesh))
        run.loads.append(max(layer.largest_load for layer in result.routing))
        run.dropped.append(statistics.mean(layer.dropped_share for layer in result.routing))
        run.unserved.append(statistics.mean(layer.unserved_share for layer in result.routing))
        run.entropies.append(statistics.mean(layer.entropy for layer in result.routing))
    run.held_out = held_out_loss(replica, held_out)
    return run


def train_all(num_steps: int, gates: list[str]) -> Iterator[Run]:
    """Each gate with each of its rules, and without."""
    with tempfile.TemporaryDirectory() as folder:
        for gate in gates:
            setting = SETTINGS[gate]
            without = {NO_RULE if setting.rules else NO_NEED: dict[str, Any]()}
            for rule, fields in (setting.rules | without).items():
                start_s = time.process_time()
                job = make_job(
                    JOB
                    | {"model": JOB["model"] | {"moe": EXPERTS | setting.gate | fields}}
                    | {"optimizer": JOB["optimizer"] | {"steps": num_steps}}
                )
                yield train(job, gate, rule, Path(folder))
                took_s = time.process_time() - start_s
                print(f"{gate}, {rule}: {took_s:.0f} s of processor time", file=sys.stderr, flush=True)


def panels(runs: list[Run]) -> list[Panel]:
    """One of each gate, with a curve for each rule."""
    result: dict[str, Panel] = {}
    for run in runs:
        starts = range(0, len(run.loads) - SMOOTHED + 1, SMOOTHED)
        points = [(float(n + SMOOTHED), statistics.mean(run.loads[n : n + SMOOTHED])) for n in starts]
        result.setdefault(run.gate, Panel(run.gate, [])).curves.append((run.rule, points))
    return list(result.values())


def main() -> None:
    """Train each setting and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=JOB["optimizer"]["steps"])
    parser.add_argument("--gates", default=";".join(SETTINGS), help="names of gates, separated by semicolons")
    parser.add_argument("--runs", type=Path, help="where to write all runs, step by step")
    parser.add_argument("--from", dest="earlier", type=Path, help="such a file, to train nothing")
    parser.add_argument("--svg", type=Path, help="where to draw the picture")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADER)
    runs: list[Run] = []
    results = (
        (Run(**values) for values in json.loads(asked.earlier.read_text()))
        if asked.earlier
        else train_all(asked.steps, asked.gates.split(";"))
    )
    for run in results:
        print(run.row(), flush=True)
        runs.append(run)
        if asked.runs:
            asked.runs.write_text(json.dumps([asdict(run) for run in runs]))
    if asked.svg:
        title = f"Busiest of {NUM_EXPERTS} experts as a multiple of the mean, over {len(runs[0].loads)} steps"
        note = f"in the layer that is least even, means of {SMOOTHED} steps; dotted: {MOST} x mean"
        asked.svg.write_text(balance_picture(title, note, panels(runs), MOST, NO_RULE))


if __name__ == "__main__":
    main()
