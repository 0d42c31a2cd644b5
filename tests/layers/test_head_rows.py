"""Rows of the vocabulary that the head computes, as the software pads them, and parameters without copies."""

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.config.software import software_of
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.kernels import product_s
from shardwright.layers.embedding_head import head_rows
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.run_table import TableLine
from shardwright.measure.measured_runs.runs import measured
from shardwright.memory.rank_estimate import peak_memory

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"


@pytest.mark.parametrize(
    ("software", "vocab", "tp", "rows"),
    [
        ("megatron-core", 50257, 1, 50304),
        ("gpt-neox", 50257, 4, 12672),  # 50,688 rows over 4
        ("fsdp-2024", 50257, 1, 50257),
        ("deepspeed-2025", 50257, 1, 50257),
        ("fsdp-2022", 50272, 8, 6288),  # metaseq pads to 8 x tp
        ("shardwright", 50257, 1, 50304),
        ("shardwright", 50264, 1, 50264),  # a multiple of 8 is not copied
    ],
)
def test_rows_are_those_that_the_software_computes(software: str, vocab: int, tp: int, rows: int) -> None:
    context = SimpleNamespace(
        software=software_of(software), shape=SimpleNamespace(vocab=vocab), grid=SimpleNamespace(tp=np.array([tp]))
    )
    assert head_rows(context) == [rows]


def test_rows_of_no_multiple_of_16_bytes_are_slow_where_there_are_tensor_cores() -> None:
    """As an H200 measured, 8,192 tokens and 768 elements: 50,257 rows take about six times as long as 50,304."""
    by_device = {}
    for device in ("H200", "A100-80G", "laptop-cpu"):
        rates = rates_of(run_of({"gpu": device, "precision": "bf16" if device != "laptop-cpu" else "fp32"}), shipped())
        odd, even = (float(product_s(rates, 8192, 768, rows, 1, rates.flops)) for rows in (50257, 50304))
        by_device[device] = odd / even
    assert 5 <= by_device["H200"] <= 7
    assert 3 <= by_device["A100-80G"] <= 5
    assert by_device["laptop-cpu"] <= 1.5


@pytest.mark.parametrize(("software", "spared"), [("fsdp@2024-05", 2), ("megatron-core@2024-05", 4)])
def test_a_table_says_that_parameters_of_16_bits_have_no_copy(software: str, spared: int) -> None:
    """FSDP keeps parameters in float32 alone and casts them where they are used, others have a float32 copy."""
    row = {"grads": "bf16", "moments": "bf16", "software": software}
    with_copy, without = (peak_memory(run_of(row | {"masters": masters}), shipped()) for masters in ("fp32", "none"))
    state = [float(memory.parameters + memory.optimizer) for memory in (with_copy, without)]
    assert state[0] - state[1] == pytest.approx(spared * 1.1e9, rel=0.02)


def run_of(changed: dict[str, str]) -> Run:
    row = next(row for row in csv.DictReader((TRUTH / "unseen-4.csv").open()) if row["id"] == "litthunder-001")
    alone = {"gpus": "1", "gpus_per_node": "1", "dp": "1", "gbs": "4", "zero_stage": "0", "masters": ""}
    run = measured(TableLine(2, row | alone | changed)).run
    assert run is not None
    return run
