"""Limits of a device beside its links: its host's launches, its power, the side of its systolic array."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.config.attention_sections import WindowSpec
from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.cost.calibration import device_of, power_share, rates_of, shipped, software_under
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.group_links import Groups
from shardwright.cost.kernels import scores_s
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.stage_time import Costing
from shardwright.explain.operator_passes import total_s
from shardwright.layers.operators import Scores
from shardwright.layers.query import PlanGrid, Run
from shardwright.layers.stage_contents import all_ranks
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.simulate.closed_form import step_time

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
FLOAT8 = "+cudnn-float8"
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


def test_each_expert_of_a_rank_is_launched_and_graphs_of_parts_leave_these_launches() -> None:
    """Transformer Engine's GroupedLinear calls a product for each expert, forward once and backward twice, of two."""
    mixture = replace(SHAPE, experts=ExpertShape(64, 8, 512))
    run = replace(RUN, shape=mixture, software="megatron-core", grid=PlanGrid(dp=8, ep=8, microbatch=1, global_batch=8))
    costing = Costing.of(run, shipped())
    slow = replace(costing, rates=replace(costing.rates, launch_s=1e-3))
    around_modules = 6.2 + 18.7  # of each product: of query, key and value, of attention's result, and two of experts
    assert slow.piece("experts").total == pytest.approx((22 + 40 + 17 + 24 + 6 * 8 + 4 * around_modules) * 1e-3)
    graphs = Costing.of(replace(run, software="megatron-core+graphs-parts"), shipped())
    parts = replace(graphs, rates=slow.rates)
    assert parts.piece("experts").total == pytest.approx((17 + 24 + 6 * 8 + 2 * around_modules) * 1e-3)


def test_modules_of_transformer_engine_keep_the_host_busy_beside_launches() -> None:
    """12 layers of 512 on DGX H100, 4,096 tokens, tp 1: 2.5 to 3.5 ms a layer and microbatch in Megatron-LM's own tests
    (d98e8a6). No kernel is added, so a device that its host keeps up with takes as long as before."""
    small = replace(SHAPE, hidden=512, heads=8, kv_heads=8, ffn=2048, sequence=1024)
    run = replace(RUN, shape=small, software="megatron-core", grid=PlanGrid(dp=8, microbatch=4, global_batch=32))
    assert 2.5e-3 < layer_of(run).total < 3.5e-3
    assert layer_of(replace(run, software="megatron-legacy")).total < 1.5e-3  # as many kernels, other modules
    again = layer_of(run, "full").total - layer_of(run).total
    assert again == pytest.approx((22 + 4 * 6.2) * 1.6e-5)
    # With tp 2 and 4 their layers take 3.6 ms, for a sum after attention and the MLP each way.
    cut = [replace(run, grid=replace(run.grid, dp=8 // tp, tp=tp)) for tp in (2, 4)]
    assert [float(layer_of(each).total) for each in cut] == pytest.approx([3.6e-3, 3.6e-3], rel=0.05)
    costing = Costing.of(replace(RUN, software="megatron-core"), shipped())
    costing = replace(costing, rates=replace(costing.rates, launch_s=0.0))
    others = replace(costing, software=costing.software.model_copy(update={"modules": "torch"}))
    assert costing.piece("dense") == others.piece("dense")


def test_products_of_experts_in_fp8_have_casts_of_their_own_but_in_one_graph() -> None:
    mixture = replace(SHAPE, experts=ExpertShape(64, 8, 512))
    grid = PlanGrid(dp=8, ep=8, microbatch=1, global_batch=8)
    wide = replace(RUN, shape=mixture, software="nemo", grid=grid, device="gb200-nvl72")
    narrow = replace(wide, grid=replace(grid, precision="mxfp8"))

    def gaps_of(run: Run) -> float:
        costing = Costing.of(run, shipped())
        gaps = replace(costing, rates=replace(costing.rates, gap_s=1.0, launch_s=0.0)).gaps("experts")
        return float(gaps.forward + gaps.input_grad)

    assert gaps_of(narrow) - gaps_of(wide) == pytest.approx(4 * 8)
    in_graph = replace(narrow, software="nemo+graphs-step")
    assert gaps_of(in_graph) == pytest.approx(20 + 35 + 19 + 29)


def test_grace_launches_slower() -> None:
    rates = {
        name: rates_of(replace(RUN, device=name), shipped()).launch_s for name in ("h100-sxm", "gh200", "gb300-nvl72")
    }
    assert rates["gh200"] == rates["gb300-nvl72"] == pytest.approx(1.39 * rates["h100-sxm"], rel=0.02)


def test_a_graph_of_a_step_leaves_its_host_the_optimizer() -> None:
    """6.4 ms beside an H100, by a test of Megatron-LM's with it in a graph and not; Grace takes longer."""
    usual = rates_of(RUN, shipped()).step_s
    behind = {
        name: rates_of(replace(RUN, device=name, software="nemo+graphs-step"), shipped()).step_s
        for name in ("h100-sxm", "gb300-nvl72")
    }
    assert behind["h100-sxm"] == pytest.approx(6.4e-3, rel=0.01)
    assert behind["gb300-nvl72"] == pytest.approx(1.39 * 6.4e-3, rel=0.02)
    assert usual > max(behind.values())
    quick = shipped() | {"common.step_s": 1e-3}
    assert rates_of(replace(RUN, software="nemo+graphs-step"), quick).step_s == pytest.approx(1e-3)


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


@pytest.mark.parametrize(("width", "tflops"), [(64, 497), (128, 648), (256, 756)])
def test_attention_takes_an_exponential_for_each_score(width: int, tflops: float) -> None:
    """FlashAttention 3 on H100 (arXiv 2407.08608, figure 5, 16k tokens, no mask): products at one share of the peak."""
    rates = rates_of(replace(RUN, device="h100-sxm"), shipped())
    rates = replace(rates, attention_forward=0.955 * 989.4e12, attention_half=0.0)
    scores = Scores(pairs=2048 / width * 16384.0**2, length=16384, width=2 * width)
    assert scores.flops / scores_s(rates, scores, backward=False) == pytest.approx(1e12 * tflops, rel=0.03)


@pytest.mark.parametrize(("device", "width", "tflops"), [("b200-sxm", 128, 1613), ("gb200-nvl72", 64, 1157)])
def test_kernels_for_blackwell_hide_exponentials(device: str, width: int, tflops: float) -> None:
    """FlashAttention 4 (arXiv 2603.05451) and cuDNN (github.com/Dao-AILab/flash-attention, pull request 2605) alone,
    16k tokens, no mask: products at the share of the peak that large ones of cuBLAS reach alone."""
    run = replace(RUN, device=device)
    peak, exponentials = device_of(device).peak_flops("bf16"), device_of(device).exponentials_t_per_s * 1e12
    rates = replace(
        rates_of(run, shipped()), attention_forward=0.79 * peak, exponentials=exponentials, attention_half=0
    )
    scores = Scores(pairs=2048 / width * 16384.0**2, length=16384, width=2 * width)
    assert scores.flops / scores_s(rates, scores, backward=False) == pytest.approx(1e12 * tflops, rel=0.03)
    one_by_one = replace(rates, exponentials_hidden=0.0)
    assert scores_s(one_by_one, scores, backward=False) > 1.3 * scores_s(rates, scores, backward=False)


def test_blackwell_ultra_takes_twice_as_many_exponentials() -> None:
    scores = Scores(pairs=1e12, length=8192, width=256)
    b200, b300 = (rates_of(replace(RUN, device=device), shipped()) for device in ("b200-sxm", "b300-sxm"))
    assert b300.exponentials == pytest.approx(2 * power_share(device_of("b300-sxm")) * b200.exponentials)
    for backward in (False, True):
        assert scores_s(b300, scores, backward) < scores_s(b200, scores, backward) / power_share(device_of("b300-sxm"))


def test_attention_in_fp8() -> None:
    """More products, as many exponentials; a backward that leaves out no window; half of query, key and value kept."""
    wide, narrow = (replace(RUN, device="gb300-nvl72", software=f"megatron-core{kernel}") for kernel in ("", FLOAT8))
    scores = Scores(pairs=1e12, length=8192, width=256)
    rates = [rates_of(run, shipped()) for run in (wide, narrow)]
    assert [rate.attention_number for rate in rates] == ["bf16", "fp8"]
    assert rates[0].exponentials == rates[1].exponentials
    for backward, least in ((False, 1.25), (True, 1.2)):
        seconds = [float(scores_s(rate, scores, backward)) for rate in rates]
        assert least * seconds[1] < seconds[0] < 2 * seconds[1]
    cut = replace(scores, pairs=1e9, unseen=9.99e11)
    assert scores_s(rates[1], cut, backward=True) == pytest.approx(scores_s(rates[1], scores, backward=True))
    assert scores_s(rates[1], cut, backward=False) < scores_s(rates[1], scores, backward=False) / 100
    for shape in (SHAPE, replace(SHAPE, window=WindowSpec(size=128)), replace(SHAPE, latent=LatentShape(0, 512))):
        costings = [Costing.of(replace(run, shape=shape), shipped()) for run in (wide, narrow)]
        chain, packed = (next(iter(costing.chains.values())) for costing in costings)
        tokens_and_heads = SHAPE.sequence * shape.heads / RUN.grid.tp
        elements = tokens_and_heads * (shape.query_width + shape.value_width) + SHAPE.sequence * (
            shape.kv_heads / RUN.grid.tp * shape.query_width
        )
        saved = sum(o.kept for o in chain) - sum(o.kept for o in packed)
        assert saved == pytest.approx(elements)
        attention = next(o.scores for o in packed if o.scores)
        assert attention.pairs + attention.unseen == pytest.approx(0.5 * tokens_and_heads * SHAPE.sequence)
    with pytest.raises(KeyError, match=r"no peak rate for float8.*, or name software whose attention is in 16 bits"):
        rates_of(replace(narrow, device="a100-sxm-80g"), shipped())


def test_a_card_on_pcie_has_the_share_of_pcie() -> None:
    constants = shipped() | {"common.link_pcie": 0.5}
    assert rates_of(replace(RUN, device="l40s", node_bytes_per_s=32e9), constants).link_bytes_per_s == 16e9
    run = replace(RUN, device="h100-sxm")
    assert rates_of(run, constants).link_bytes_per_s == rates_of(run, shipped()).link_bytes_per_s


def test_where_nothing_is_said_the_network_is_that_of_the_device() -> None:
    run = replace(RUN, network_bytes_per_s=0.0, network="infiniband")
    port, default = (
        rates_of(replace(run, device=device), shipped()).network_bytes_per_s for device in ("b300-sxm", "rtx-4090")
    )
    assert port / default == pytest.approx(100e9 / shipped()["common.network_default"])


def test_a_generation_with_one_kernel_of_attention_has_its_share_under_both_names() -> None:
    rates = [
        rates_of(replace(RUN, device="mi250x-gcd", software=software), shipped())
        for software in ("fsdp-2024", "megatron-core")
    ]
    assert rates[0].attention_forward == rates[1].attention_forward


def test_fp8_gathers_a_byte_of_each_parameter() -> None:
    """In software that keeps parameters in fp8, and not where products are in fp4 or 16 bits."""

    def gather_s(precision: str, software: str) -> float:
        grid = PlanGrid(dp=8, zero=1, precision=precision).as_arrays()
        run = replace(RUN, device="b200-sxm", software=software, grid=grid)
        rates, ranks = rates_of(run, shipped()), all_ranks(run.shape, grid)
        ends = DataParallel.of(run, software_under(run), rates, Groups(run), ranks, PieceTime())
        return float(np.max(ends.exchanged_s()[2]))

    assert gather_s("fp8", "nemo") == pytest.approx(gather_s("bf16", "nemo") / 2, rel=0.05)
    assert gather_s("nvfp4", "nemo") == gather_s("bf16", "nemo")
    assert gather_s("fp8", "megatron-core") == gather_s("bf16", "megatron-core")


def test_a_systolic_array_that_heads_fill_in_part_makes_products_longer_alone() -> None:
    """256 rows on a TPU v6e: heads of 128 fill half of them, of 256 all; 128 rows before.

    Of the time with heads of 128 the softmax is a third, as profiled on a v6e (35, 33 and 32 % for products of scores,
    softmax and products of values, together 36.4 % of the peak: tpu/Wan2.2/docs/wan_tpu_optimization_guide.md in
    yangwhale/gpu-tpu-pedia).
    """

    def seconds(device: str, width: int) -> float:  # in those that the products would take at the peak
        shape = replace(SHAPE, head_dim=width)
        rates = rates_of(replace(RUN, shape=shape, device=device, software="xla"), shipped())
        return device_of(device).peak_flops("bf16") / rates.attention_forward

    products_s = 256 / 128
    softmax_s = seconds("tpu-v6e", 128) - products_s
    assert softmax_s / seconds("tpu-v6e", 128) == pytest.approx(0.33, abs=0.01)
    assert seconds("tpu-v6e", 256) == pytest.approx(1 + softmax_s)
    assert 1 / seconds("tpu-v6e", 128) == pytest.approx(0.364, rel=0.1)
    assert seconds("tpu-v5p", 256) == seconds("tpu-v5p", 128) == pytest.approx(seconds("tpu-v6e", 256))


def test_a_token_goes_once_to_each_rank_that_has_experts_for_it() -> None:
    """8 choices over 8 ranks go to 8 (1 - (7/8)^8) = 5.25 of them."""
    shape = replace(SHAPE, experts=ExpertShape(num=128, topk=8, ffn=768))
    grid = PlanGrid(dp=8, ep=8, microbatch=8, global_batch=512)
    run = replace(RUN, shape=shape, grid=grid, software="megatron-bridge")
    assert sent_s(run) / sent_s(replace(run, software="nemo")) == pytest.approx(1 - (7 / 8) ** 8, abs=0.02)


def sent_s(run: Run) -> float:
    (time,) = [time for time in Costing.of(run, shipped()).operators("experts") if time.operator.name == "dispatch"]
    return float(time.forward[0].seconds)


def test_wide_products_are_faster_on_a_device_that_computes_alone() -> None:
    """Plans of a search differ in it, too; products in fp8 are as fast as measured alone already."""
    grid = replace(RUN.grid, tp=1, precision="fp8")
    rates = [rates_of(replace(RUN, grid=replace(grid, dp=dp)), shipped()) for dp in (1, 2, 256)]
    alone, *several = (float(rate.flops_wide) for rate in rates)
    assert alone == pytest.approx(shipped()["common.alone"] * several[0]) and several[0] == several[1] < alone
    assert len({float(rate.flops_product) for rate in rates}) == 1
    plans = replace(rates[0], busy=np.array([1, 8])).flops_wide
    assert plans.tolist() == pytest.approx([alone, several[0]])


def test_the_same_fine_tuning_takes_as_much_longer_on_four_gpus_as_measured() -> None:
    """VectorLM's table of Llama 3 8B on A100 (unseen-8.csv): 1.10 to 1.12 times the step of one GPU on each of 4, and
    1.12 to 1.13 on each of 8. Their tokens and plans are the same but for the replicas."""
    rows = {row.id: row for row in read_runs(TRUTH / "unseen-8.csv") if row.family == "vectorlm"}
    runs = [rows[f"vectorlm-00{n}"] for n in range(1, 10)]
    measured, predicted = (
        [[step(runs[n + more]) / step(runs[n]) for n in range(3)] for more in (3, 6)]
        for step in (lambda row: row.step_s, lambda row: float(step_time(row.run, shipped()).total))
    )
    for is_so, is_said in zip(measured, predicted, strict=True):
        assert is_said == pytest.approx(is_so, rel=0.05)
