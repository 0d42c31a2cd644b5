"""Memory of Megatron-LM's small runs, whose configurations say what computes attention and loss, and their dropout."""

from pathlib import Path
from statistics import median

import pytest

from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.row_software import software_of_row
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.validate import predict

RUNS = Path(__file__).parents[2] / "benchmarks" / "truth" / "runs.csv"
ROW = {"software": "megatron-core@2025-06", "gpu": "H100"}


def test_a_row_says_its_dropout_and_what_computes_its_loss() -> None:
    plain = software_of(software_of_row({**ROW, "attention": "fused-softmax", "dropout": "1", "fused_loss": "0"}))
    fused = software_of(software_of_row({**ROW, "dropout": "0", "fused_loss": "1"}))
    assert (plain.attention, plain.dropout, plain.logit_peak) == ("softmax", True, 6.0)
    assert (fused.dropout, fused.logit_peak) == (False, 2.0)
    assert sum(plain.loss) == 52.0


def test_memory_of_dense_runs_with_single_operators() -> None:
    """The allocator's peaks that Megatron-LM's tests expect: each within 15 %, half of them within 2.5 %."""
    rows = [row for row in read_runs(RUNS) if row.id.startswith("mlmgold") and row.run]
    dense = [row for row in rows if row.run and not row.run.shape.experts and "+softmax" in row.run.software]
    errors = {p.row.id: (p.memory_gb or 0.0) / (p.row.memory_gb or 1.0) - 1 for p in predict(dense, shipped())}
    assert len(errors) == 27
    assert {name: error for name, error in errors.items() if abs(error) > 0.15} == {}
    assert median(abs(error) for error in errors.values()) < 0.025


@pytest.mark.parametrize("change", ["dropout", "plain-loss"])
def test_changes_name_their_software(change: str) -> None:
    assert software_of(f"megatron-core+{change}") != software_of("megatron-core")
