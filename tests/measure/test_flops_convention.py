"""FLOPs as sources count them: with attention, half of it or none, with what is computed again or not."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.layers.query import PlanGrid, Run
from shardwright.measure.measured_runs.flops_convention import stated_flops

SHAPE = ModelShape(24, 2304, 24, 24, 96, 9216, False, 51200, 2048)
RUN = Run(
    SHAPE,
    PlanGrid(recompute="full"),
    device="a100-sxm-80g",
    software="megatron-2021",
    devices_per_node=8,
    node_bytes_per_s=0.0,
    network_bytes_per_s=0.0,
)
FULL = SHAPE.flops_per_token()
NONE = replace(SHAPE, sequence=0).flops_per_token()


@pytest.mark.parametrize(
    ("said", "flops"),
    [
        ("", FULL),
        ("model FLOPs, full attention, no recompute", FULL),
        ("MFU: 72*B*L*s*h^2*(1+s/6h+V/12hL), full attention; HFU adds selective attention recompute", FULL),
        ("full (non-causal) attention in model FLOPs", FULL),
        ("hardware FLOPs incl. recompute forward: 96*B*s*l*h^2*(1+s/6h+V/16lh)", 4 / 3 * FULL),
        ("SC21 Megatron formula (counts recompute when checkpointing on)", 4 / 3 * FULL),
        ("Model TFLOP/s: causal attention halved, no recompute", (FULL + NONE) / 2),
        ("6N, no attention", NONE),
        ("6ND", NONE),
        ("per token 6*N_params + 12*L*d*s (full attention)", FULL),
        ("HFU, without attention", 4 / 3 * NONE),
    ],
)
def test_a_convention_is_read(said: str, flops: float) -> None:
    assert stated_flops(said, RUN) == pytest.approx(flops)


def test_nothing_is_counted_again_where_nothing_is_computed_again() -> None:
    assert stated_flops("hardware FLOPs", replace(RUN, grid=PlanGrid())) == FULL


def test_parameters_that_a_source_states_count_where_attention_does_not() -> None:
    assert stated_flops("6ND", RUN, 1.7e9) == pytest.approx(6 * 1.7e9)
    assert stated_flops("model FLOPs", RUN, 1.7e9) == FULL


def test_megatrons_formula_is_ours() -> None:
    """Equation 3 of Narayanan et al. 2021 per token, 1 sequence."""
    layers, h, s, v = 24, 2304, 2048, 51200
    theirs = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    mine = stated_flops("hardware FLOPs", RUN)
    # Their formula counts the head's forward once; 4/3 counts it again: 2 v h of 96 l h^2.
    assert mine == pytest.approx(theirs + 2 * v * h)
