"""The printed range is wider where a fact of a run makes its prediction less sure."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.prediction_range import families_by_constant, range_ends, share_of_experts, unsure_facts
from shardwright.layers.query import Run
from shardwright.simulate.closed_form import step_time

MODEL = {"layers": 2, "hidden": 4096, "heads": 32, "ffn": 8192, "vocab": 1024, "sequence": 2048}
EXPERTS = {"moe": {"experts": 8, "top_k": 2}}
SMALL = {"hidden": 1024}


def run_on(device: str, fields: Mapping[str, object] = MODEL, **precision: str) -> Run:
    cluster = {"device": device, "nodes": 1, "devices_per_node": 8}
    job = {"model": {**MODEL, **fields}, "cluster": cluster, "plan": {"dp": 8}}
    return run_of(make_job({**job, "precision": {"compute": "bf16", **precision}}))


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        (run_on("h100-sxm"), set()),
        (run_on("a100-sxm-80g"), set()),
        (run_on("b200-sxm"), {"device"}),  # one family of runs tells that rate
        (run_on("b200-sxm", float8="rowwise"), {"device"}),
        (run_on("b300-sxm"), {"device"}),  # a B200 under another power limit
        (run_on("mi300x"), {"device"}),
        (run_on("h100-sxm", EXPERTS), {"experts"}),
        (run_on("tpu-v6e", SMALL), {"device", "small"}),
    ],
    ids=lambda value: getattr(value, "device", ""),
)
def test_facts_that_make_a_prediction_less_sure(run: Run, facts: set[str]) -> None:
    fitted = families_by_constant()
    assert set(unsure_facts(run, is_named=True, fitted=fitted)) == facts
    assert set(unsure_facts(run, is_named=False, fitted=fitted)) == facts | {"software"}


def test_each_fact_widens_the_range_as_squares_add() -> None:
    constants = shipped() | {"common.device_range": 3.0, "common.experts_range": 4.0, "common.low": 0.9}
    usual, device, both = (
        range_ends(run, constants) for run in (run_on("h100-sxm"), run_on("mi300x"), run_on("mi300x", EXPERTS))
    )
    assert device == pytest.approx([end ** math.sqrt(10) for end in usual])
    assert both == pytest.approx([end ** math.sqrt(26) for end in usual])


def test_the_spread_of_experts_counts_by_their_share_of_the_step() -> None:
    constants, run = shipped() | {"common.experts_range": 4.0, "common.low": 0.9}, run_on("h100-sxm", EXPERTS)
    usual = range_ends(run_on("h100-sxm"), constants)
    for share, width in ((0.0, 1.0), (0.5, math.sqrt(5)), (1.0, math.sqrt(17))):
        assert range_ends(run, constants, expert_share=share) == pytest.approx([end**width for end in usual])
    steps = [step_time(run_on("h100-sxm", {"moe": {**EXPERTS["moe"], "ffn": ffn}}), constants) for ffn in (1024, 16384)]
    assert steps[0].low / steps[0].total > steps[1].low / steps[1].total


def test_experts_take_the_journeys_of_tokens_and_their_part_of_the_products() -> None:
    run = run_on("h100-sxm", EXPERTS)
    seconds = {"computed_s": 6.0, "total_s": 10.0}
    sent, products = (share_of_experts(run, sent_s=sent_s, **seconds) for sent_s in (1.0, 0.0))
    assert sent - products == pytest.approx(0.1)
    flops = 2 * 6 * 2 * 3 * 4096 * 8192 / run.shape.flops_per_token()  # layers, both passes, choices, matrices
    assert products == pytest.approx(0.6 * flops)
    assert share_of_experts(run_on("h100-sxm"), sent_s=0.0, **seconds) == 0.0


def test_a_generation_whose_runs_are_left_out_has_a_wider_range() -> None:
    run = run_on("h100-sxm")
    others = {name: answer for name, answer in families_by_constant().items() if not name.startswith("hopper.")}
    assert range_ends(run, shipped())[0] > range_ends(run, shipped(), fitted=others)[0]
    elsewhere = replace(run, device="a100-sxm-80g")
    assert range_ends(elsewhere, shipped(), fitted=others) == range_ends(elsewhere, shipped())
