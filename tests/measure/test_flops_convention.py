"""FLOPs as sources count them: with attention, half of it or none, with what is computed again or not."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.layers.query import PlanGrid, Run
from shardwright.measure.measured_runs.flops_convention import counted_flops

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
    ("counted", "flops"),
    [
        ("", FULL),
        ("model", FULL),
        ("hardware", 4 / 3 * FULL),
        ("model-causal", (FULL + NONE) / 2),
        ("model-6n", NONE),
        ("hardware-6n", 4 / 3 * NONE),
    ],
)
def test_flops_as_a_source_counts_them(counted: str, flops: float) -> None:
    assert counted_flops(counted, RUN) == pytest.approx(flops)


def test_nothing_is_counted_again_where_nothing_is_computed_again() -> None:
    assert counted_flops("hardware", replace(RUN, grid=PlanGrid())) == FULL


def test_parameters_that_a_source_states_count_where_attention_does_not() -> None:
    assert counted_flops("model-6n", RUN, 1.7e9) == pytest.approx(6 * 1.7e9)
    assert counted_flops("model", RUN, 1.7e9) == FULL


def test_megatrons_formula_is_ours() -> None:
    """Equation 3 of Narayanan et al. 2021 per token, 1 sequence."""
    layers, h, s, v = 24, 2304, 2048, 51200
    reference = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    own = counted_flops("hardware", RUN)
    # Their formula counts the head's forward once; 4/3 counts it again: 2 v h of 96 l h^2.
    assert own == pytest.approx(reference + 2 * v * h)
