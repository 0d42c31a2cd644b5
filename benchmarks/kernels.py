"""Predicted rates of products and of attention against public measurements of them by themselves.

    python benchmarks/kernels.py                   # prints a table; benchmarks/truth/kernels.csv has the rows

A row is a kernel of one shape on one device and the TFLOP/s that it reached. FLOPs of attention are halved where it is
causal, and a backward has 2.5 times as many as a forward. A wide product is predicted as on a device that computes
alone (`alone` of the calibrations), others as in a training step; no constant is fitted to these rows.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwright.config.load import make_job
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.cost.calibration import Rates, rates_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.kernels import product_s, scores_s
from shardwright.layers.arrays import Numbers
from shardwright.layers.operators import Scores

TABLE = Path(__file__).parent / "truth" / "kernels.csv"
TOKENS = 16384  # of a batch, in every row of attention
# The software that has the kernel of a library, or of a number type; others are held against cuDNN's in 16 bits.
SOFTWARE = {"flash2": "torchtitan", "splash": "xla", **dict.fromkeys(("fp8", "mxfp8"), "megatron-core+cudnn-float8")}


@dataclass(frozen=True)
class MeasuredKernel:
    """A measured kernel and what is predicted for it, both in TFLOP/s."""

    name: str
    device: str
    library: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.measured / self.predicted


def measured_kernels() -> Iterator[MeasuredKernel]:
    """All rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_product = row["kernel"] == "product"
            in_number = "" if row["number"] == "bf16" else f" in {row['number']}"
            name = f"product in {row['number']}" if is_product else f"attention{in_number}, {row['direction']}"
            predicted = _product_tflops(row) if is_product else _attention_tflops(row)
            yield MeasuredKernel(name, row["device"], row["library"], float(row["tflops"]), predicted)


@cache
def _rates(device: str, software: str, number: str, head_dim: int = 128) -> Rates:
    """The rates of a device under a software, with products in a number type and heads so wide."""
    cluster = {"device": device, "nodes": 1, "devices_per_node": 1}
    run = run_of(make_job({"cluster": cluster, "precision": {"compute": "fp16" if number == "fp16" else "bf16"}}))
    shape, grid = replace(run.shape, head_dim=head_dim), replace(run.grid, precision=number)
    return rates_of(replace(run, shape=shape, software=software, grid=grid), shipped())


def _product_tflops(row: dict[str, str]) -> float:
    rates = _rates(row["device"], "megatron-core", row["number"])
    rows, inner, columns = int(row["rows"]), int(row["inner"]), int(row["columns"])
    seconds = product_s(rates, rows, inner, columns, batch=1, rate=_rate(rates, row["number"]))
    return float(2e-12 * rows * inner * columns / seconds)


def _rate(rates: Rates, number: str) -> Numbers:
    """Rate of products alone: of wide ones as on a single device, of narrow ones as they are measured."""
    return rates.flops_product if NUMBER_TYPES[number].is_narrow else rates.flops_wide


def _attention_tflops(row: dict[str, str]) -> float:
    software = SOFTWARE.get(row["library"]) or SOFTWARE.get(row["number"], "megatron-core")
    rates = _rates(row["device"], software, "bf16", int(row["head_dim"]))
    sequence, is_backward = int(row["sequence"]), row["direction"] == "backward"
    pairs = TOKENS * sequence * int(row["heads"]) / (2 if row["causal"] == "1" else 1)
    scores = Scores(pairs, sequence, 2 * int(row["head_dim"]))
    return float(1e-12 * scores.flops * (2.5 if is_backward else 1.0) / scores_s(rates, scores, is_backward))


def error(rows: list[MeasuredKernel]) -> float:
    """The median error: a ratio r counts as |log r|."""
    return math.exp(statistics.median(abs(math.log(row.ratio)) for row in rows)) - 1


def main() -> None:
    """Print a line a kernel, device and library."""
    groups: dict[tuple[str, str, str], list[MeasuredKernel]] = defaultdict(list)
    for row in measured_kernels():
        groups[row.name, row.device, row.library].append(row)
    print("| kernel | device | library | rows | predicted / measured: median, least, most | median error |")
    print("|---|---|---|---|---|---|")
    for (name, device, library), rows in sorted(groups.items()):
        ratios = sorted(row.ratio for row in rows)
        ends = f"{statistics.median(ratios):.2f}, {ratios[0]:.2f}, {ratios[-1]:.2f}"
        print(f"| {name} | {device} | {library} | {len(rows)} | {ends} | {error(rows):.1%} |")
    print(f"\nall: {error([row for rows in groups.values() for row in rows]):.1%}")


if __name__ == "__main__":
    main()
