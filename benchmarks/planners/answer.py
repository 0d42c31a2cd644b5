"""The answer of a planner about a measured run, and a table of answers: the form that all adapters here share."""

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
    """Seconds of a step and GB (1e9 bytes) of the fullest device; 0 where there is none, and a reason."""

    step_s: float
    memory_gb: float
    reason: str = ""
    fits: bool = True


class Planner(Protocol):
    """A planner with the files it ships."""

    def answer(self, run: Run) -> Answer:
        """Its step time and memory of a run; ValueError with every reason why its input can't express the run."""


def asked(planner: Planner, row: Measured) -> Answer:
    """A planner's answer about a row; no answer says why.

    Layers of stages are not told: no table has them, they follow from a description of software that is ours.
    """
    if row.run is None:
        return Answer(0.0, 0.0, row.reason)
    try:
        answer = planner.answer(replace(row.run, grid=replace(row.run.grid, layout=())))
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
    arguments = parser.parse_args()
    planner = open_planner(arguments.folder)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["id", "step_s", "memory_gb", "reason"])
    for row in read_runs(arguments.runs):
        answer = asked(planner, row)
        seconds = f"{answer.step_s:.6g}" if answer.step_s else ""
        memory = f"{answer.memory_gb:.5g}" if answer.memory_gb else ""
        table.writerow([row.id, seconds, memory, answer.reason])


def limits_of_all(run: Run) -> dict[str, bool]:
    """The limits that all planners here share, each with True where a run keeps within it."""
    grid = run.grid
    return {
        "no ZeRO shards among a part of the replicas": not grid.zero or grid.zero_ranks in (0, grid.dp),
        f"no {grid.precision} products beside 16-bit parameters": grid.precision in ("bf16", "fp16"),
        "no recomputation by operator": grid.recompute in ("none", "selective", "full"),
        "no recomputation of some layers only": not grid.policies,
        f"{grid.global_batch} sequences are not whole microbatches of {grid.microbatch} on {grid.dp} replicas": not (
            grid.global_batch % (grid.dp * grid.microbatch)
        ),
    }
