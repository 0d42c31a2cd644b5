"""Inputs of layers that tp ranks split are gathered before the layers are computed again."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.cost.calibration import shipped
from shardwright.cost.collective_time import ring_s
from shardwright.cost.stage_time import Costing
from shardwright.layers.query import PlanGrid, Run

SHAPE = ModelShape(4, 2048, 16, 16, 128, 8192, False, 51200, 1024)
RUN = Run(
    SHAPE,
    PlanGrid(dp=1, tp=8, microbatch=4, global_batch=64, precision="fp16"),
    device="v100-sxm-32g",
    software="megatron-2021",
    devices_per_node=16,
    node_bytes_per_s=150e9,
    network_bytes_per_s=6.25e9,
)


def further_s(policy: str, **changes: object) -> float:
    """Seconds that a layer takes longer where its input is split."""
    run = replace(RUN, grid=replace(RUN.grid, **changes))
    split, whole = (
        Costing.of(replace(run, software=run.software + change), shipped()).piece("dense", policy).total
        for change in ("+split-inputs", "")
    )
    return float(split - whole)


def test_one_gather_for_each_layer_that_is_computed_again() -> None:
    costing = Costing.of(RUN, shipped())
    gather_s = float(ring_s(costing.rates, costing.groups.tp, 2 * 4 * 1024 * 2048))
    assert further_s("full") == pytest.approx(gather_s)
    assert further_s("none") == further_s("full", sequence_parallel=1) == further_s("full", tp=1) == 0.0
