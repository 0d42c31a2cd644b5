"""What limits a device beside its links: its host's launches, its power, the side of its systolic array."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape
from shardwright.cost.calibration import device_of, power_share, rates_of, shipped
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.stage_time import Costing
from shardwright.explain.operator_passes import total_s
from shardwright.layers.query import PlanGrid, Run
from shardwright.simulate.closed_form import step_time

SHAPE = ModelShape(16, 2048, 32, 32, 64, 8192, True, 131072, 4096)
RUN = Run(
    SHAPE,
    PlanGrid(dp=1, tp=8, microbatch=1, global_batch=64),
    device="h100-sxm",
    software="nanotron",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)


def layer_of(run: Run, policy: str = "none", **changed: float) -> PieceTime:
    costing = Costing.of(run, shipped())
    return replace(costing, rates=replace(costing.rates, **changed)).piece("dense", policy)


def test_a_device_waits_for_the_launches_of_its_host() -> None:
    """A pass takes the longer of both, not their sum: small layers the host's time, large ones the device's."""
    slow = layer_of(RUN, launch_s=5e-5)
    assert slow.forward + slow.exposed_forward == pytest.approx(60 * 5e-5)
    assert slow.total == pytest.approx(170 * 5e-5)
    fast = layer_of(RUN, launch_s=0.0)
    assert layer_of(RUN, launch_s=1e-6).total == fast.total < slow.total
    large = replace(RUN, grid=replace(RUN.grid, microbatch=16))
    assert layer_of(large, launch_s=5e-5).total == pytest.approx(float(layer_of(large, launch_s=0.0).total))


def test_what_is_computed_again_is_launched_again() -> None:
    assert layer_of(RUN, "full", launch_s=5e-5).total == pytest.approx((170 + 60) * 5e-5)


def test_gaps_have_the_waits_for_the_host() -> None:
    """Explain's operators and gaps add up to the piece."""
    costing = Costing.of(RUN, shipped())
    costing = replace(costing, rates=replace(costing.rates, launch_s=5e-5))
    gaps, piece = costing.gaps("dense"), costing.piece("dense")
    kernels = total_s(float(time.kernels.forward) for time in costing.operators("dense"))
    assert kernels is not None
    assert kernels + gaps.forward == pytest.approx(float(piece.forward))


def test_compiled_programs_launch_nothing() -> None:
    """XLA's step is one program: its host launches no kernel."""
    run = replace(RUN, software="xla")
    assert layer_of(run, launch_s=1.0) == layer_of(run, launch_s=0.0)


def test_halving_microbatches_of_a_small_model_does_not_help_where_the_host_is_the_limit() -> None:
    """On 8 H100 with tp 4 or 8 a microbatch took the same 71 to 74 ms (hfgrid-0023 and 0029)."""
    slow = shipped() | {"common.launch_s": 2.6e-5}
    runs = [replace(RUN, grid=PlanGrid(dp=8 // tp, tp=tp, microbatch=1, global_batch=256)) for tp in (4, 8)]
    four, eight = (float(step_time(run, slow).total) for run in runs)
    assert eight == pytest.approx(2 * four, rel=0.05)


@pytest.mark.parametrize(
    ("device", "share"),
    [
        ("h100-sxm", 1.0),
        ("h100-hbm2e-96g", (500 / 700) ** 0.5),
        ("gb200-nvl72", 1.2**0.5 * 2250 / 2500),
        ("gb300-nvl72", 1.4**0.5 * 2250 / 2500),
        ("b300-sxm", 1.1**0.5),
    ],
)
def test_products_go_as_the_root_of_power(device: str, share: float) -> None:
    assert power_share(device_of(device)) == pytest.approx(share)


def test_power_holds_for_all_products_and_attention() -> None:
    full, less = (rates_of(replace(RUN, device=device), shipped()) for device in ("h100-sxm", "h100-hbm2e-96g"))
    share = (500 / 700) ** 0.5
    for name in ("flops", "flops_product", "attention_forward", "attention_backward"):
        assert getattr(less, name) == pytest.approx(share * getattr(full, name)), name


def test_attention_fills_a_systolic_array_no_further_than_a_head_is_wide() -> None:
    """256 rows on a TPU v6e: heads of 128 fill half of them, of 256 all; 128 rows before."""

    def rate(device: str, width: int) -> float:
        shape = replace(SHAPE, head_dim=width)
        rates = rates_of(replace(RUN, shape=shape, device=device, software="xla"), shipped())
        return rates.attention_forward / device_of(device).peak_flops("bf16")

    assert rate("tpu-v6e", 256) == pytest.approx(2 * rate("tpu-v6e", 128))
    assert rate("tpu-v5p", 256) == rate("tpu-v5p", 128) == pytest.approx(rate("tpu-v6e", 256))


def test_a_token_goes_once_to_each_rank_that_has_experts_for_it() -> None:
    """8 choices over 8 ranks go to 8 (1 - (7/8)^8) = 5.25 of them."""
    shape = replace(SHAPE, experts=ExpertShape(num=128, topk=8, ffn=768))
    grid = PlanGrid(dp=8, ep=8, microbatch=8, global_batch=512)
    run = replace(RUN, shape=shape, grid=grid, software="megatron-bridge")
    assert sent_s(run) / sent_s(replace(run, software="nemo")) == pytest.approx(1 - (7 / 8) ** 8, abs=0.02)


def sent_s(run: Run) -> float:
    (time,) = [time for time in Costing.of(run, shipped()).operators("experts") if time.operator.name == "dispatch"]
    return float(time.forward[0].seconds)
