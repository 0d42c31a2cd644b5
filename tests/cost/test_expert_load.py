"""Rows of the fullest expert rank over the mean: even, with a rule of balance, without one."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from shardwright.config import catalog
from shardwright.config.load import load_job
from shardwright.config.model_shape import ModelShape, shape_of
from shardwright.config.section_shapes import ExpertShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.collective_time import all_to_all_s
from shardwright.cost.expert_load import fullest_load, spread_by_bias
from shardwright.cost.group_links import Groups
from shardwright.cost.stage_time import Costing
from shardwright.layers.query import PlanGrid, Run
from shardwright.simulate.closed_form import step_time

MIXTURE = ExpertShape(num=128, topk=8, ffn=768)


def load(routing: str, ep: int, **fields: int) -> float:
    return float(fullest_load(replace(MIXTURE, routing=routing, **fields), ep, spread=0.35))


def test_forced_routing_is_even() -> None:
    assert load("forced", 16) == 1.0


def test_experts_of_one_rank_even_each_other_out() -> None:
    assert load("balanced", 1) == 1.0
    few, more = load("balanced", 16, num=64, topk=4), load("balanced", 16, num=1024, topk=64)
    assert few > load("balanced", 16) > more > 1.0
    assert load("balanced", 16) == pytest.approx(1 + 0.35 * np.sqrt(2 * np.log(16) / 8))


def test_a_share_varies_as_that_of_choices_made_at_random() -> None:
    """Against choices that are drawn: groups of tokens that each take `topk` of `num` experts."""
    random, groups = np.random.default_rng(0), 64
    deviations = {}
    for num, topk in ((128, 8), (8, 2), (32, 4)):
        rows = [
            np.bincount(np.concatenate([random.permutation(num)[:topk] for _ in range(groups)]), minlength=num)
            for _ in range(200)
        ]
        deviations[num] = np.std(rows) / np.mean(rows)
        bare = replace(MIXTURE, routing="balanced", num=num, topk=topk)
        excess = (float(fullest_load(bare, num, deviations[128])) - 1) / np.sqrt(2 * np.log(num))  # one expert a rank
        assert excess == pytest.approx(deviations[num], rel=0.03)
    assert load("balanced", 8, num=8, topk=8) == 1.0  # every token takes all


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    free = load("balanced", 16)
    assert float(fullest_load(replace(MIXTURE, routing="balanced", most_load=1.1), 16, 0.35)) == 1.1 < free
    assert float(fullest_load(replace(MIXTURE, routing="balanced", most_load=0.5), 16, 0.35)) == 1.0
    assert float(fullest_load(replace(MIXTURE, routing="balanced", most_load=2.0), 16, 0.35)) == free


def test_a_job_is_routed_by_its_own_rule() -> None:
    def experts(name: str, **fields: object) -> ExpertShape:
        shape = shape_of(
            load_job(name, [f"model.moe.{field}={value}" for field, value in fields.items()]).model
        ).experts
        assert shape is not None
        return shape

    mixture = experts("quickstart-moe")
    assert (mixture.routing, mixture.most_load) == ("balanced", np.inf)
    assert experts("quickstart-moe", capacity_factor=1.25).most_load == 1.25
    assert experts("quickstart-deepseek").routing == experts("deepseek-v3").routing == "biased"
    by_experts = experts("quickstart-moe", gate="expert-choice", aux_loss="none", softmax_over="all")
    assert by_experts.routing == "forced"


@pytest.mark.parametrize(("num", "topk", "ep"), [(8, 2, 4), (8, 4, 4), (12, 4, 6), (6, 3, 1), (6, 3, 6)])
def test_without_a_rule_all_tokens_choose_the_same_experts(num: int, topk: int, ep: int) -> None:
    """Against every choice of them, counted one by one."""
    fullest = [
        max(np.bincount([expert // (num // ep) for expert in chosen])) for chosen in combinations(range(num), topk)
    ]
    assert load("free", ep, num=num, topk=topk) == pytest.approx(np.mean(fullest) * ep / topk)


def test_plans_in_one_array() -> None:
    loads = fullest_load(replace(MIXTURE, routing="free"), np.array([1, 8, 16]), 0.35)
    assert loads == pytest.approx([load("free", ep) for ep in (1, 8, 16)])


def test_biases_even_out_what_lasts_and_not_what_a_sequence_is_about() -> None:
    """Over all data the fullest of 64 experts has 1.04 times the mean (Wang et al. 2024, table 2)."""
    assert 1 + spread_by_bias(0.014, 0.27, 1e9) * np.sqrt(2 * np.log(64)) == pytest.approx(1.04, abs=0.002)
    one, many = spread_by_bias(0.0, 0.27, np.array([1, 64]))
    assert (one, many) == pytest.approx((0.27, 0.27 / 8))
    assert spread_by_bias(0.014, 0.27, 0.25) == spread_by_bias(0.014, 0.27, 1)  # ranks share a sequence


RUN = Run(
    ModelShape(48, 2048, 32, 4, 128, 6144, True, 151936, 4096, experts=MIXTURE),
    PlanGrid(dp=16, ep=16, global_batch=1024, zero=1),
    device="h100-sxm",
    software="megatron-bridge",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)  # Qwen3-30B-A3B of Megatron-Bridge's cards


def test_tokens_cross_nodes_and_are_sent_on_afterwards() -> None:
    """Profiled of the run: 8.25 s of journeys a step, of which 9.079 ms are 0.11 % (Megatron-Bridge at 067f987,
    skills/nemo-mbridge-perf-moe-comm-overlap). DeepEP's, which HAI-LLM has, forward while they receive."""
    exposed, hidden = (
        float(step_time(RUN, shipped() | {"common.expert_exposed": share}).total) for share in (1.0, 0.0)
    )
    assert exposed - hidden == pytest.approx(0.009079 / 0.0011, rel=0.15)
    group, rates = Groups(RUN).ep, rates_of(RUN, shipped())
    one_by_one, at_once = (all_to_all_s(rates, group, 2**27, 0.2, 1.0, is_pipelined) for is_pipelined in (False, True))
    assert 1.5 * at_once < one_by_one < 2 * at_once
    assert [name for name in catalog.names("software") if software_of(name).expert_pipelined] == [
        "hai-llm",
        "hai-llm-2024",
    ]


def test_a_step_waits_for_the_fullest_rank() -> None:
    """Natural routing of Qwen3-30B-A3B on 16 H100 took 1.23 times as long as forced with the same dispatcher and CUDA
    graphs, and no overlap (benchmarks/truth/routing.csv); without a rule, it takes much longer."""

    def seconds(routing: str) -> float:
        routed = replace(RUN.shape, experts=replace(MIXTURE, routing=routing))
        return float(step_time(replace(RUN, shape=routed), shipped()).total)

    assert seconds("balanced") / seconds("forced") == pytest.approx(30.28955 / 24.7138, abs=0.04)
    assert seconds("free") > 1.5 * seconds("forced")
    assert seconds("forced") < seconds("biased") < 1.1 * seconds("forced")


def test_shared_experts_do_not_wait_for_the_fullest_rank() -> None:
    """All tokens meet them: their time is the same under any routing."""
    seconds: dict[str, dict[str, float]] = {}
    for routing in ("forced", "free"):
        routed = replace(RUN.shape, experts=replace(MIXTURE, routing=routing, shared_ffn=768))
        costing = Costing.of(replace(RUN, shape=routed), shipped())
        seconds[routing] = {op.operator.name: float(op.kernels.forward) for op in costing.operators("experts")}
    slower = {name for name, forward_s in seconds["free"].items() if forward_s > seconds["forced"][name]}
    assert {"expert up", "expert activation", "expert down"} <= slower
    assert not [name for name in slower if name.startswith("shared")]
