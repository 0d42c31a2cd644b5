"""What a planner says about a measured run, and a table of it: the form that all adapters here share."""

import argparse
import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shardwright.cost.calibration import device_of
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.runs import Measured, read_runs

RUNS = Path(__file__).parent.parent / "truth" / "runs.csv"


@dataclass(frozen=True)
class Answer:
    """Seconds of a step and GB (1e9 bytes) of the fullest device; 0 and a reason where there is no answer."""

    step_s: float
    memory_gb: float
    reason: str = ""
    fits: bool = True


class Planner(Protocol):
    """A planner with the files it ships."""

    def answer(self, run: Run) -> Answer:
        """What it says about a run; ValueError where its input can't say what the run is, with every reason."""


def asked(planner: Planner, row: Measured) -> Answer:
    """A planner's answer about a row; no answer says why."""
    if row.run is None:
        return Answer(0.0, 0.0, row.reason)
    try:
        answer = planner.answer(row.run)
    except ValueError as error:
        return Answer(0.0, 0.0, str(error))
    return replace(answer, fits=answer.memory_gb * 1e9 <= device_of(row.run.device).memory_gib * 2**30)


def refuse(faults: list[str]) -> None:
    """ValueError with all faults, if there are some."""
    if faults:
        raise ValueError("; ".join(faults))


def write_answers(open_planner: Callable[[Path], Planner], option: str) -> None:
    """The command of an adapter: id,step_s,memory_gb,reason of every row on standard output."""
    parser = argparse.ArgumentParser(description="One planner's predictions for a table of measured runs, as CSV.")
    parser.add_argument(option, dest="folder", type=Path, required=True, help="the folder with the planner's package")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the table  [default: benchmarks/truth/runs.csv]")
    said = parser.parse_args()
    planner = open_planner(said.folder)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["id", "step_s", "memory_gb", "reason"])
    for row in read_runs(said.runs):
        answer = asked(planner, row)
        numbers = ["", ""] if answer.reason else [f"{answer.step_s:.6g}", f"{answer.memory_gb:.5g}"]
        table.writerow([row.id, *numbers, answer.reason])


def said_by_none(run: Run) -> dict[str, bool]:
    """What the input of no planner here can say, and whether a run does without it."""
    grid = run.grid
    return {
        "no ZeRO shards among a part of the replicas": not grid.zero or grid.zero_ranks in (0, grid.dp),
        f"no {grid.precision} products beside 16-bit parameters": grid.precision in ("bf16", "fp16"),
        "no recomputation by operator": grid.recompute != "matmul",
        "no recomputation of some layers only": not grid.policies,
        "no uneven stages": not grid.layout,
        f"{grid.global_batch} sequences are not whole microbatches of {grid.microbatch} on {grid.dp} replicas": not (
            grid.global_batch % (grid.dp * grid.microbatch)
        ),
    }
