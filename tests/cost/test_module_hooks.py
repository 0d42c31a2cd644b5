"""Hooks of DeepSpeed's ZeRO-3 around each module keep the host as long as launches do."""

import csv
from pathlib import Path

from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.run_table import TableLine
from shardwright.measure.measured_runs.runs import measured
from shardwright.simulate.closed_form import step_time

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"


def seconds(row_id: str, changed: dict[str, str]) -> float:
    row = next(row for row in csv.DictReader((TRUTH / "unseen-4.csv").open()) if row["id"] == row_id)
    run = measured(TableLine(2, row | changed)).run
    assert run is not None
    return float(step_time(run, shipped()).total)


def test_small_microbatches_wait_for_hooks_and_large_ones_hide_them() -> None:
    """Qwen 1.8B in microbatches of 256 tokens takes three times as long under ZeRO-3, in ones of 8,192 as long."""
    small, large = (
        seconds(name, {"zero_stage": "3"}) / seconds(name, {"zero_stage": "0"}) for name in ("qwenft-001", "qwenft-006")
    )
    assert 2 <= small <= 4
    assert 0.95 <= large <= 1.05


def test_experts_have_modules_of_their_own() -> None:
    """128 experts in turn are 640 modules of a layer: the host alone takes longer than the device."""
    assert seconds("swift-005", {"zero_stage": "3"}) > 1.2 * seconds("swift-005", {"zero_stage": "2"})
