"""Hooks of ZeRO-3 around modules, of DeepSpeed, Megatron-LM and torch, keep the host as long as launches do."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import device_constant, device_of, shipped
from shardwright.cost.stage_time import Costing
from shardwright.layers.query import PlanGrid, Run
from shardwright.measure.measured_runs.run_table import TableLine
from shardwright.measure.measured_runs.runs import measured
from shardwright.simulate.closed_form import step_time

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"


def seconds(row_id: str, changed: dict[str, str], table: str = "unseen-4") -> float:
    row = next(row for row in csv.DictReader((TRUTH / f"{table}.csv").open()) if row["id"] == row_id)
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


def test_megatron_fsdp_has_hooks_for_each_tensor_of_an_expert() -> None:
    """32 experts of a rank have 64 tensors, whose hooks the device hides in part; two have 4, whose hooks it hides."""
    row, passes = "mfsdp2-001", 2 * 48 * 4  # of each layer and microbatch a forward and a backward
    sharded, whole = (seconds(row, {"zero_stage": zero}, "unseen-9") for zero in ("3", "1"))
    launch_s = device_constant(shipped(), device_of("gb200-nvl72"), "launch_s")
    hooks_s = passes * 32 * software_of("megatron-core").zero.expert_hooks * launch_s
    assert 0.5 * hooks_s < sharded - whole < hooks_s
    few = {"experts": "8", "topk": "2", "expert_ffn": "12288"}
    sharded, whole = (seconds(row, few | {"zero_stage": zero}, "unseen-9") for zero in ("3", "1"))
    assert sharded < 1.1 * whole


def launches_of_a_layer(software: str, **grid: int) -> float:
    """Launches of a layer, and its hooks in launches, where one launch is slower than all else."""
    run = Run(
        ModelShape(16, 2048, 32, 32, 64, 8192, True, 131072, 4096),
        PlanGrid(dp=8, microbatch=1, global_batch=64, **grid),
        device="h100-sxm",
        software=software,
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    costing = Costing.of(run, shipped())
    return float(replace(costing, rates=replace(costing.rates, launch_s=1.0)).piece("dense").total)


@pytest.mark.parametrize(("software", "hooks"), [("torchtitan", 49), ("transformers-2025", 55), ("fsdp-2024", 30)])
def test_torch_has_hooks_around_a_layer_where_it_gathers_it(software: str, hooks: int) -> None:
    whole, sharded = (launches_of_a_layer(software, zero=zero) for zero in (1, 3))
    assert sharded - whole == pytest.approx(2 * hooks)
    in_pipeline = launches_of_a_layer(software, zero=3, pp=2) - launches_of_a_layer(software, zero=1, pp=2)
    assert 0 < in_pipeline < 0.5 * 2 * hooks
