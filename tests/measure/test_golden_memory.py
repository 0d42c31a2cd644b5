"""Memory of Megatron-LM's small runs, whose configurations say what computes attention and loss, and their dropout."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from pydantic import ValidationError

from shardwright.config.elementwise_kernels import loss_traffic
from shardwright.config.software import software_of
from shardwright.config.usual_runs import UsualSettingsSpec
from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.row_software import software_of_row
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.validate import predict
from shardwright.memory.rank_estimate import peak_memory

RUNS = Path(__file__).parents[2] / "benchmarks" / "truth" / "runs.csv"
ROW = {"software": "megatron-core@2025-06", "gpu": "H100"}


def test_a_row_says_its_dropout_and_what_computes_its_loss() -> None:
    plain = software_of(software_of_row({**ROW, "attention": "fused-softmax", "dropout": "1", "fused_loss": "0"}))
    fused = software_of(software_of_row({**ROW, "dropout": "0", "fused_loss": "1"}))
    assert (plain.attention, plain.dropout, plain.logit_peak) == ("softmax", True, 6.0)
    assert (fused.dropout, fused.logit_peak) == (False, 2.0)
    assert sum(loss_traffic(plain.loss)) == 52.0
    compiled = software_of(software_of_row({**ROW, "compiled_loss": "1"}))
    assert (compiled.logit_peak, sum(loss_traffic(compiled.loss))) == (10.0, 40.0)
    parts = software_of(software_of_row({"software": "transformers@2026-08", "gpu": "H100", "loss_by_parts": "1"}))
    assert parts.logit_peak < software_of("transformers-2025").logit_peak / 50


def test_memory_of_dense_runs_with_single_operators() -> None:
    """The allocator's peaks that Megatron-LM's tests expect: each within 15 %, half of them within 2.5 %."""
    rows = [row for row in read_runs(RUNS) if row.id.startswith("mlmgold") and row.run]
    dense = [row for row in rows if row.run and not row.run.shape.experts and "+softmax" in row.run.software]
    errors = {p.row.id: (p.memory_gb or 0.0) / (p.row.memory_gb or 1.0) - 1 for p in predict(dense, shipped())}
    assert len(errors) == 27
    assert {name: error for name, error in errors.items() if abs(error) > 0.15} == {}
    assert median(abs(error) for error in errors.values()) < 0.025


@pytest.mark.parametrize(
    "change", ["dropout", "plain-loss", "compiled-loss", "loss-by-parts", "plain-gate", "split-inputs", "graphs-parts"]
)
def test_changes_name_their_software(change: str) -> None:
    assert software_of(f"megatron-core+{change}") != software_of("megatron-core")


def test_a_compiled_loss_and_a_gate_of_single_operators_are_held() -> None:
    """Peaks of Megatron-Bridge 0.1 on H100, which had neither Transformer Engine's loss nor a fused gate."""
    rows = [row for row in read_runs(RUNS.with_name("unseen-9.csv")) if row.family == "nebq" and row.memory_gb]
    kept = [row for row in rows if row.run and not row.run.grid.offload_activations]
    errors = {p.row.id: (p.memory_gb or 0.0) / (p.row.memory_gb or 1.0) - 1 for p in predict(kept, shipped())}
    assert len(errors) == 19
    assert {name: error for name, error in errors.items() if abs(error) > 0.055} == {}
    assert software_of_row(ROW | {"fused_gate": "0"}) == "megatron-core+plain-gate"
    assert software_of("megatron-core+plain-gate").activation_kept == 2.0


def test_half_gradients_of_early_megatron_have_copies() -> None:
    """Until July 2021 float32 copies and the gradients of the step before stay (6 bytes an element): five logs."""
    rows = [row for row in read_runs(RUNS.with_name("unseen-6.csv")) if row.family == "jzmeg"]
    errors = [(p.memory_gb or 0.0) / (p.row.memory_gb or 1.0) - 1 for p in predict(rows, shipped())]
    assert len(errors) == 5
    assert all(abs(error) < 0.05 for error in errors)
    run = rows[0].run
    assert run
    names = "megatron-2021", "megatron-2021-08"
    early, later = (peak_memory(replace(run, software=name), shipped()) for name in names)
    # Of 8 bytes an element 6 are copies; later software makes 4 in the update, when activations are free.
    copies = float(early.gradients) * 6 / 8
    assert float(early.gradients - later.gradients) == pytest.approx(copies)
    step_bytes = float(early.activations + early.working)
    assert float(later.activations + later.working) == pytest.approx(max(step_bytes, copies * 4 / 6))


def test_inputs_that_are_split_over_tp_ranks() -> None:
    """DeepSpeed's partition_activations: of the input of each layer a rank keeps 1/tp, unless it has a part already."""
    row = next(row for row in read_runs(RUNS.with_name("unseen-6.csv")) if row.id == "jzds-001")
    assert row.run
    whole = replace(row.run, software=row.run.software.removesuffix("+split-inputs"))
    assert whole.software != row.run.software
    saved = peak_memory(whole, shipped()).activations - peak_memory(row.run, shipped()).activations
    assert float(saved) == pytest.approx(64 * 48 * 1024 * 8192 * 2 * 3 / 4)
    parts = replace(whole, grid=replace(whole.grid, sequence_parallel=True))
    split = replace(parts, software=row.run.software)
    assert float(peak_memory(split, shipped()).activations) == float(peak_memory(parts, shipped()).activations)


def test_segments_that_grow_came_in_october_2024() -> None:
    """torchtitan's launcher set them then: before, what lies idle between blocks is a share of a step's bytes."""
    row = next(row for row in read_runs(RUNS.with_name("unseen-6.csv")) if row.id == "titanpr-003")
    assert row.run and row.run.software == "torchtitan-2024-03"
    later = peak_memory(replace(row.run, software="torchtitan"), shipped())
    before = peak_memory(row.run, shipped())
    step_bytes = float(before.activations + before.working + before.buffers)
    assert float(before.total) == float(later.total)
    assert float(before.slack - later.slack) > 0.08 * step_bytes


@pytest.mark.parametrize(
    ("software", "gpu", "precision", "graphs", "change"),
    [
        ("nemo@2025-06", "GB200", "fp8", "", "graphs-parts"),
        ("nemo@2025-06", "H100", "fp8", "", ""),
        ("nemo@2025-06", "GB200", "fp8", "none", ""),
        ("megatron-bridge@2026-08", "GB300", "mxfp8", "", "graphs-step"),
        ("megatron-bridge@2026-08", "GB300", "bf16", "", "graphs-parts"),
        ("megatron-bridge@2026-08", "GB300", "bf16", "step", "graphs-step"),
        ("megatron-lm@2026-01", "GB300", "bf16", "", ""),
    ],
)
def test_graphs_that_a_row_does_not_say_are_the_usual_ones(
    software: str, gpu: str, precision: str, graphs: str, change: str
) -> None:
    """NVIDIA's recipes for Blackwell; those for H100 have none."""
    row = {**ROW, "software": software, "gpu": gpu, "precision": precision, "graphs": graphs}
    assert [word for word in software_of_row(row).split("+") if word.startswith("graphs")] == [change] * bool(change)


def test_overlaps_that_a_row_does_not_say_are_the_usual_ones() -> None:
    """Most of Megatron-Bridge's recipes for H100 hide no journey to experts; NeMo's description does."""
    row = {**ROW, "software": "megatron-bridge@2026-08"}
    assert software_of_row(row) == "megatron-bridge+no-overlap-a2a"
    assert software_of_row({**row, "overlap": "a2a"}) == "megatron-bridge"
    assert software_of_row({**row, "gpu": "GB200"}) == "megatron-bridge+graphs-parts"
    assert software_of_row({**ROW, "software": "nemo@2025-06"}) == "nemo"


def test_a_usual_overlap_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="'a3a' names no overlap; use one of tp, dp, pp, a2a, no-tp"):
        UsualSettingsSpec(devices=("hopper",), overlap=("a3a",))
