"""The cost of a step: properties that no constant may break, and collectives against closed forms."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.load import load_job
from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape
from shardwright.cost.calibration import device_of, rates_of, shipped
from shardwright.cost.collective_time import all_to_all_s, ring_s
from shardwright.cost.from_job import run_of
from shardwright.cost.kernels import fill
from shardwright.cost.token_copies import copies_in_turn, copies_sent
from shardwright.cost.topology import Group, group_of, reach_of_ranks
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.rank_estimate import rank_memory
from shardwright.simulate.closed_form import step_time

CONSTANTS = shipped()
LLAMA = ModelShape(16, 4096, 32, 8, 128, 14336, True, 128256, 4096)
MOE = replace(LLAMA, experts=ExpertShape(num=64, topk=4, ffn=2048))
RUN = Run(
    LLAMA,
    PlanGrid(dp=8, global_batch=64),
    device="h100-sxm",
    software="megatron-core",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)

CUTS = st.builds(
    PlanGrid,
    dp=st.sampled_from([1, 2, 16]), tp=st.sampled_from([1, 2, 8, 16]), pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]), zero=st.sampled_from([0, 1, 2, 3]), microbatch=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(), recompute=st.sampled_from(["none", "selective", "full", "matmul"]),
    global_batch=st.just(128),
)  # fmt: skip


def seconds(run: Run) -> float:
    return step_time(run, CONSTANTS).total


@settings(max_examples=40, deadline=None)
@given(CUTS, st.sampled_from(["node_bytes_per_s", "network_bytes_per_s"]))
def test_more_bandwidth_is_never_slower(grid: PlanGrid, link: str) -> None:
    run = replace(RUN, grid=grid)
    assert seconds(replace(run, **{link: 2 * getattr(run, link)})) <= seconds(run)


@settings(max_examples=40, deadline=None)
@given(CUTS)
def test_parts_add_up(grid: PlanGrid) -> None:
    t = step_time(replace(RUN, grid=grid), CONSTANTS)
    parts = t.compute + t.again + t.tensor + t.context + t.expert + t.data + t.messages + t.bubble
    assert parts + t.optimizer + t.host + t.other == pytest.approx(t.total)
    assert t.low < t.total < t.high
    assert 0 < t.mfu <= t.hfu < 1


def test_time_scales_with_layers() -> None:
    one, two, four = (seconds(replace(RUN, shape=replace(LLAMA, layers=n))) for n in (8, 16, 32))
    assert (four - two) == pytest.approx(2 * (two - one), rel=1e-6)


def test_degrees_of_one_cost_no_communication() -> None:
    t = step_time(replace(RUN, grid=PlanGrid(global_batch=8)), CONSTANTS)
    assert (t.tensor, t.context, t.expert, t.data, t.messages, t.bubble) == (0, 0, 0, 0, 0, 0)


def test_experts_travel() -> None:
    grid = PlanGrid(dp=8, ep=8, global_batch=64, zero=1)
    near, far = (
        step_time(
            Run(
                MOE,
                grid,
                device="h100-sxm",
                software="megatron-core",
                devices_per_node=node,
                node_bytes_per_s=450e9,
                network_bytes_per_s=50e9,
            ),
            CONSTANTS,
        )
        for node in (8, 1)
    )
    assert 0 < near.expert < far.expert
    assert (
        step_time(
            Run(
                MOE,
                replace(grid, ep=1),
                device="h100-sxm",
                software="nemo",
                devices_per_node=8,
                node_bytes_per_s=450e9,
                network_bytes_per_s=50e9,
            ),
            CONSTANTS,
        ).expert
        == 0
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "gpipe", "zb-v", "v-half"])
def test_bubbles_follow_their_schedules(schedule: str) -> None:
    grid = PlanGrid(pp=4, global_batch=32, schedule=schedule, virtual=2 if schedule in ("zb-v", "v-half") else 1)
    shape = replace(LLAMA, vocab=2)  # equal stages
    plain = step_time(replace(RUN, shape=shape, grid=replace(grid, schedule="1f1b", virtual=1)), CONSTANTS)
    t = step_time(replace(RUN, shape=shape, grid=grid), CONSTANTS)
    pace = (plain.compute + plain.again) / 32
    if schedule in ("1f1b", "gpipe"):
        assert t.bubble == pytest.approx(3 * pace, rel=0.02)
    else:
        assert t.bubble < plain.bubble


def test_more_microbatches_hide_the_bubble() -> None:
    shares = []
    for batch in (8, 32, 128):
        t = step_time(replace(RUN, grid=PlanGrid(pp=4, global_batch=batch)), CONSTANTS)
        shares.append(t.bubble / t.total)
    assert shares == sorted(shares, reverse=True)


def test_ranks_that_broadcast_their_updates_take_turns() -> None:
    """InternEvo's ranks broadcast whole tensors, of which a model has only so many."""
    run = replace(RUN, device="a100-sxm-80g", network_bytes_per_s=12.5e9, network="roce")

    def data_s(software: str, dp: int) -> float:
        return step_time(replace(run, software=software, grid=PlanGrid(dp=dp, zero=1, global_batch=dp)), CONSTANTS).data

    longer = [data_s("internevo", dp) - data_s("flash-2023", dp) for dp in (64, 256, 1024)]
    assert longer[0] < longer[1] < longer[2] < 16 * longer[1]


def test_shards_that_nothing_hides_are_waited_for() -> None:
    """DeepSpeed's ZeRO-3 of 2021 had Megatron-LM's kernels, but gathered tensor by tensor and prefetched nothing."""
    run = replace(RUN, device="a100-sxm-80g", network_bytes_per_s=25e9, grid=PlanGrid(dp=512, zero=3, global_batch=512))
    hidden, waited = (step_time(replace(run, software=name), CONSTANTS) for name in ("megatron-2021", "deepspeed-2021"))
    rate = 0.9 <= waited.compute / hidden.compute <= 1.1  # its calibration has no slower products
    assert rate and waited.data > 2.7 * hidden.data > 0
    assert step_time(replace(run, software="deepspeed-2021", grid=replace(run.grid, dp=1)), CONSTANTS).data == 0


@pytest.mark.parametrize(("software", "by_element"), [("megatron-core", 2 + 4 + 12), ("fsdp-2024", 4 + 4 + 8)])
def test_state_by_element(software: str, by_element: int) -> None:
    """A copy in float32 beside 16-bit parameters, or parameters in float32 that are cast where they are used."""
    memory = rank_memory(replace(RUN, software=software, grid=PlanGrid()), CONSTANTS)[0]
    state = memory.parameters + memory.gradients + memory.optimizer
    assert state == pytest.approx(by_element * LLAMA.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("zero", "offload_optimizer", "by_element"),
    [
        (0, 0.0, 2 + 2 + 12),
        (1, 0.0, 2 + 2 + 12 / 8),  # a rank's share of the float32 copy and two moments
        (2, 0.0, 2 + (2 + 12) / 8),
        (3, 0.0, (2 + 2 + 12) / 8),  # the shard has its copy beside it
        (2, 1.0, 2),  # gradients add up in host memory, too
        (3, 1.0, 2 / 8),
    ],
)
def test_state_of_deepspeed_by_element(zero: int, offload_optimizer: float, by_element: float) -> None:
    grid = PlanGrid(dp=8, zero=zero, global_batch=8, offload_optimizer=offload_optimizer)
    memory = rank_memory(replace(RUN, software="deepspeed-2024", grid=grid), CONSTANTS)[0]
    state = memory.parameters + memory.gradients + memory.optimizer
    assert state == pytest.approx(by_element * LLAMA.parameters, rel=1e-3)


def test_buffers_of_deepspeed_do_not_depend_on_the_model() -> None:
    """A bucket of 5e8 elements, and under ZeRO-3 another beside it and 1e9 gathered elements, as far as there are."""
    small = replace(LLAMA, layers=2, vocab=32000)
    run = replace(RUN, software="deepspeed-2024")

    def buffers(zero: int, shape: ModelShape = LLAMA, dp: int = 8) -> float:
        grid = PlanGrid(dp=dp, zero=zero, global_batch=dp)
        return float(rank_memory(replace(run, shape=shape, grid=grid), CONSTANTS)[0].buffers)

    assert [buffers(zero) for zero in (0, 1, 2)] == [0, 2 * 5e8, 2 * 5e8]
    assert buffers(1, small) == buffers(1) and buffers(1, dp=1) == buffers(3, dp=1) == 0
    assert buffers(3) == 2 * (1e9 + 1e9)
    assert small.parameters < 1e9 and buffers(3, small) == pytest.approx(2 * (1e9 + small.parameters), rel=1e-4)


def test_computation_waits_for_the_gradients_of_each_microbatch() -> None:
    """DeepSpeed's ZeRO-2 reduces after each microbatch; by default nothing computes meanwhile (overlap_comm)."""

    def data_s(zero: int, microbatches: int) -> float:
        grid = PlanGrid(dp=8, zero=zero, global_batch=8 * microbatches)
        return float(step_time(replace(RUN, software="deepspeed-2024", grid=grid), CONSTANTS).data)

    once = data_s(2, 1)
    assert data_s(1, 4) == pytest.approx(once) and once > 0
    reduce_s = data_s(2, 2) - once
    assert 0 < reduce_s < once and data_s(2, 4) == pytest.approx(once + 3 * reduce_s)


def test_unknown_numbers_say_what_to_add() -> None:
    with pytest.raises(KeyError, match=r"float8 to its file, or set precision\.float8 to none"):
        step_time(replace(RUN, device="a100-sxm-80g", grid=replace(RUN.grid, precision="fp8")), CONSTANTS)
    with pytest.raises(KeyError, match="not in the catalog"):
        step_time(replace(RUN, device="h1000"), CONSTANTS)
    with pytest.raises(ValueError, match="schedule 'nope' is not known"):
        step_time(replace(RUN, grid=PlanGrid(pp=2, schedule="nope", global_batch=8)), CONSTANTS)


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_device_of_the_catalog_is_priced(name: str) -> None:
    peaks = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}
    number = next(n for n, peak in peaks.items() if peak in device_of(name).peak_tflops)
    run = replace(RUN, device=name, grid=PlanGrid(precision=number, global_batch=2), node_bytes_per_s=0.0)
    assert seconds(run) > 0
    assert rank_memory(run, CONSTANTS)[0].total > 0


# --- kernels and collectives ---


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 8))
def test_a_product_never_fills_more_than_all(rows: int, columns: int, batch: int) -> None:
    assert 0 < fill(rows, columns, batch, 108) <= 1
    assert fill(rows, columns, batch, 108) <= fill(108 * 512, 1024, 1, 108) == 1


def test_a_group_shares_the_ports_of_its_domain() -> None:
    rates = rates_of(RUN, CONSTANTS)
    size = 1e12  # so that latency is nothing
    assert group_of(16, 1, reach_of_ranks(8)) == Group(16, 8)
    assert group_of(16, 8, reach_of_ranks(8)) == Group(16, 1)
    assert group_of(4, 2, reach_of_ranks(8)) == Group(4, 4)
    whole, alone = (ring_s(rates, group, size) for group in (Group(16, 8), Group(16, 1)))
    assert alone == pytest.approx(size * 15 / 16 / rates.network_bytes_per_s, rel=1e-3)
    assert whole == pytest.approx(max(alone / 8, size * 15 / 16 / rates.link_bytes_per_s), rel=1e-3)
    chained = replace(rates, switch_reduce_bytes_per_s=0.0)
    assert ring_s(chained, Group(8, 8), size, 2) == pytest.approx(2 * ring_s(rates, Group(8, 8), size), rel=1e-3)
    assert ring_s(rates, Group(1, 1), size) == all_to_all_s(rates, Group(1, 1), size) == 0


@given(st.integers(1, 16), st.integers(1, 64))
def test_a_token_is_sent_to_a_domain_once(topk: int, domains: int) -> None:
    copies = copies_sent(topk, domains)
    assert min(1, domains / topk) * 0.6 < copies <= 1 + 1e-12
    assert topk * copies <= min(topk, domains) + 1e-9


@given(st.integers(1, 16), st.integers(1, 32), st.integers(1, 16))
def test_experts_in_turn_lie_on_as_many_places_as_counted(topk: int, experts: int, places: int) -> None:
    """Each token gets the next experts in their order, over all experts as often as they begin anew."""
    num = experts * places
    if topk > num:
        return
    chosen = np.arange(topk * num).reshape(num, topk) % num // experts
    is_whole = topk <= num - experts + 1  # no token has experts at both ends of one place
    counted = np.mean([len(set(row)) for row in chosen])
    expected = topk * float(copies_in_turn(topk, experts))
    assert counted == pytest.approx(expected) if is_whole else counted <= expected + 1e-9


def test_tokens_that_may_reach_few_nodes_and_travel_in_8_bits_cost_less() -> None:
    """DeepSeek-V3 (arXiv 2412.19437, sections 2.1.2 and 3.3.3): at most 4 of 8 nodes, and fp8 on the way there."""
    slow = "cluster.inter_node.bandwidth_gb_per_s=5"  # so that computing hides little of it
    run = run_of(load_job("deepseek-v3", ["cluster.software=hai-llm", "precision.float8_dispatch=false", slow]))
    experts = run.shape.experts
    assert experts is not None and experts.reach == 0.5

    def travel(run: Run) -> float:
        return step_time(run, CONSTANTS).expert

    anywhere = replace(run, shape=replace(run.shape, experts=replace(experts, reach=1.0)))
    # Of 8 choices, evenly: 8 (1 - (7/8)^8) = 5.25 nodes of 8 are met, or 4 (1 - (3/4)^8) = 3.60 of 4.
    assert travel(run) / travel(anywhere) == pytest.approx(3.60 / 5.25, rel=0.02)
    # It also overlaps and dedupes, and sends 16 bits where a job does not say otherwise; on afterwards, so that links
    # must take no time here.
    linked = replace(run, node_bytes_per_s=1e18)
    in_16_bits = replace(linked, software="nemo", grid=replace(run.grid, float8_dispatch=False))
    assert travel(in_16_bits) / travel(linked) == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.parametrize("field", ["memory_gb_per_s", "multiprocessors", "link_gb_per_s"])
def test_a_device_of_which_a_rate_is_not_known(field: str, tmp_path: Path) -> None:
    """A rate that a file leaves out is unknown, not zero: it is asked for, and nothing is divided by it."""
    known = {"memory_gib": 80.0, "memory_gb_per_s": 3350.0, "multiprocessors": 132, "generation": "hopper"}
    known["link_gb_per_s"] = 450.0
    device = tmp_path / "mine.toml"
    device.write_text("\n".join(f"{key} = {json.dumps(known[key])}" for key in known if key != field))
    with device.open("a") as file:
        file.write("\npeak_tflops = { float32 = 66.9 }\n")
    cluster = {"device": str(device), "devices_per_node": 8, "nodes": 1}
    job = load_job("quickstart", [f"cluster.{key}={json.dumps(value)}" for key, value in cluster.items()])
    with pytest.raises(KeyError, match=f"has no known {field}; add it to its file"):
        rates_of(run_of(job), shipped())
