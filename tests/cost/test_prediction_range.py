"""The printed range is wider where a fact of a run makes its prediction less sure."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.known_runs import KnownRuns, known_runs, unlike
from shardwright.cost.prediction_range import (
    families_by_constant,
    range_ends,
    range_width,
    share_of_experts,
    unsure_facts,
)
from shardwright.layers.query import Run
from shardwright.simulate.closed_form import step_time

MODEL = {"layers": 2, "hidden": 4096, "heads": 32, "ffn": 8192, "vocab": 1024, "sequence": 2048}
EXPERTS = {"moe": {"experts": 8, "top_k": 2}}
SMALL = {"hidden": 1024}
# As if every run were like one to which constants are fitted, and none had work on the host.
LIKE = {"common.unfitted_range": 0.0, "common.unmeasured_range": 0.0, "common.host_range": 0.0}


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
    constants = shipped() | LIKE | {"common.device_range": 3.0, "common.experts_range": 4.0, "common.low": 0.9}
    usual, device, both = (
        range_ends(run, constants) for run in (run_on("h100-sxm"), run_on("mi300x"), run_on("mi300x", EXPERTS))
    )
    assert device == pytest.approx([end ** math.sqrt(10) for end in usual])
    assert both == pytest.approx([end ** math.sqrt(26) for end in usual])


def test_the_spread_of_experts_counts_by_their_share_of_the_step() -> None:
    run = run_on("h100-sxm", EXPERTS)
    constants = shipped() | LIKE | {"common.experts_range": 4.0, "common.low": 0.9}
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


KNOWN = (
    KnownRuns("one", True, "megatron-core", "hopper", "bf16", ((0.4, 8), (70.0, 64))),
    KnownRuns("two", False, "megatron-core", "hopper", "bf16", ((0.4, 64),)),
    KnownRuns("three", False, "nanotron", "hopper", "bf16", ((0.4, 8),)),
)


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, (0, 0)),
        ({"devices": 32}, (0, 0)),  # four times as many
        ({"devices": 33}, (1, 0)),
        ({"devices": 1024}, (0, 1)),
        ({"parameters": 0.8}, (0, 0)),
        ({"parameters": 0.81}, (0, 1)),
        ({"software": "nanotron"}, (1, 0)),
        ({"software": "megatron-core+flash1"}, (0, 0)),  # what a row says beside changes no description
        ({"software": "nemo"}, (0, 1)),
        ({"device": "h200-sxm"}, (0, 0)),
        ({"device": "a100-sxm-80g"}, (0, 1)),
        ({"number": "fp16"}, (0, 1)),
        ({"without": {"one"}}, (0, 1)),
        ({"devices": 32, "without": {"one"}}, (1, 0)),
        ({"without": {"hopper"}}, (0, 1)),
    ],
)
def test_runs_that_are_like_measured_ones(fields: dict, shares: tuple[int, int]) -> None:
    """One fact at a time, from a run that is like one to which constants are fitted."""
    run = run_on(fields.get("device", "h100-sxm"))
    grid = replace(run.grid, dp=fields.get("devices", 8), precision=fields.get("number", "bf16"))
    run = replace(run, grid=grid, software=fields.get("software", "megatron-core"))
    scale = run.shape.parameters / 1e9 * 0.4 / fields.get("parameters", 0.4) / 0.4
    known = tuple(replace(runs, sizes=tuple((scale * size, num) for size, num in runs.sizes)) for runs in KNOWN)
    assert tuple(map(float, unlike(run, frozenset(fields.get("without", ())), known))) == shares


def test_each_plan_is_compared_by_its_own_devices() -> None:
    run = replace(run_on("h100-sxm"), software="megatron-core")
    grid = replace(run.grid, dp=np.array([8, 40, 4096])).as_arrays()
    known = tuple(replace(runs, sizes=((run.shape.parameters / 1e9, runs.sizes[0][1]),)) for runs in KNOWN)
    unfitted, unmeasured = unlike(replace(run, grid=grid), known=known)
    assert unfitted.tolist() == [0, 1, 0] and unmeasured.tolist() == [0, 0, 1]


def test_the_catalog_has_the_measured_runs_that_the_tables_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from fit_range import MEASURED, measured_runs, text_of

    assert text_of(measured_runs()) == MEASURED.read_text(), "run benchmarks/fit_range.py"
    assert {*known_runs()} == {*measured_runs()}
    assert any(runs.is_fitted for runs in known_runs()) and not all(runs.is_fitted for runs in known_runs())


def test_the_range_is_wider_the_more_of_a_step_the_host_takes() -> None:
    run = run_on("h100-sxm")
    widths = [range_ends(run, shipped(), host_share=share)[1] for share in (0.0, 0.1, 0.5)]
    assert widths == sorted(widths) and widths[0] < widths[1] < widths[2]
    plain, hosted = (
        step_time(replace(run, software="deepspeed-2024", grid=replace(run.grid, offload_optimizer=share)), shipped())
        for share in (0.0, 1.0)
    )
    assert hosted.high / hosted.total > plain.high / plain.total


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        ("none to which constants are fitted", {"unfitted": 1}),
        ("it is like no measured run", {"unmeasured": 1}),
        ("TPU, Blackwell)", {"device": 1}),
        ("experts that take half of the step", {"experts": 0.5}),
        ("hidden size up to 1,024", {"small": 1}),
        ("nothing says what software runs", {"software": 1}),
        ("no measured run is known to be like it, too", {"software": 1, "unmeasured": 1}),
        ("a tenth of the step (offload)", {"host": 0.1}),
    ],
)
def test_docs_have_the_range_of_each_fact(row: str, shares: dict[str, float]) -> None:
    docs = Path(__file__).parents[2] / "docs" / "measured-runs.md"
    constants = shipped()
    width = float(range_width({fact: constants[f"common.{fact}_range"] for fact in shares}, shares))
    low, high = (round(100 * (constants[f"common.{end}"] ** width - 1)) for end in ("low", "high"))
    (line,) = (line for line in docs.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and row in line)
    assert f"{low} to +{high} %" in line
