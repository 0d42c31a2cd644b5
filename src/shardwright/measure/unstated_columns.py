"""Columns that a table of measured runs leaves empty, and how far apart usual values of them put its predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardwright.config.progress_records import tell_share
from shardwright.cost.calibration import Constants
from shardwright.measure.measured_runs.row_facts import GRAPHS
from shardwright.measure.measured_runs.run_table import TableLine, read_lines
from shardwright.measure.measured_runs.runs import measured
from shardwright.simulate.batch_pricing import prices

_MOST_ROWS = 16  # that are tried, evenly spread over the table
_LEAST_SPREAD = 0.02  # below it a column is not worth a word

# Usual values of a column, of which one holds where a row says nothing.
USUAL_VALUES: Mapping[str, tuple[str, ...]] = {
    "software": ("megatron-lm", "nemo", "fsdp", "deepspeed"),
    "recompute": ("none", "selective", "full"),
    "zero_stage": ("0", "1", "3"),
    "sp": ("0", "1"),
    "mbs": ("1", "2", "4"),
    "attention": ("fused-softmax", "flash2", "cudnn"),
    "overlap": ("dp", "tp dp pp a2a"),
    "network": ("infiniband", "efa", "tcp"),
    "grads": ("bf16", "fp32"),
    "precision": ("bf16", "fp8"),
    "graphs": GRAPHS,
}


@dataclass(frozen=True)
class UnstatedColumn:
    """A column, the number of rows that leave it empty, and the median ratio, less 1, of the slowest to the fastest
    prediction that its usual values give."""

    name: str
    rows: int
    spread: float


def unstated_columns(table: Path, constants: Constants) -> list[UnstatedColumn]:
    """The columns that would tell most if they were filled, the first most."""
    lines = [line for line in read_lines(table) if not line.faults]
    columns = []
    for number, (name, values) in enumerate(USUAL_VALUES.items()):
        tell_share(name, number / len(USUAL_VALUES))
        empty = [line for line in lines if not line.row.get(name) and _matters(name, line)]
        chosen = empty[:: max(1, -(-len(empty) // _MOST_ROWS))]
        spreads = [spread for line in chosen if (spread := _spread(line, name, values, constants)) is not None]
        if spreads and (median := float(np.median(spreads))) >= _LEAST_SPREAD:
            columns.append(UnstatedColumn(name, len(empty), median))
    return sorted(columns, key=lambda column: -column.spread)


def _matters(name: str, line: TableLine) -> bool:
    """False if a column says nothing of a row's plan: a named framework has its own attention and overlap, and few have
    CUDA graphs where nothing says so."""
    row = line.row
    if name in ("attention", "overlap", "grads"):
        return not row.get("software")
    if name == "graphs":
        return (run := measured(line).run) is not None and "+graphs-" in run.software
    return name != "software" or not row.get("date")


def _spread(line: TableLine, name: str, values: Sequence[str], constants: Constants) -> float | None:
    """The ratio by which the slowest of the predictions is longer than the fastest; None if fewer than two values have
    one."""
    rows = [measured(replace(line, row={**line.row, name: value})) for value in values]
    runs = [row.run for row in rows if row.run is not None and not row.faults]
    seconds = [float(price.time.total) for price in prices(runs, constants) if not isinstance(price, str)]
    return max(seconds) / min(seconds) - 1 if len(seconds) > 1 else None
