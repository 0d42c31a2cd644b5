"""A model over sizes of a cluster: what strong and weak scaling keep, and what is told of it."""

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.memory.job_memories import fullest
from shardwright.planner.critical_batch import batch_limits
from shardwright.planner.scaling import Scaling, at_size, scaling, sizes_of
from shardwright.report.scaling_report import scaling_dict, scaling_picture, scaling_text
from shardwright.simulate.full_step import simulated_step
from support.few_plans import best_of_few
from support.languages import assert_same_in_chinese, words_of_picture

SIZES = [1, 16, 32, 64]
MODEL = {"name": "m", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "sequence": 4096}


def job(**cluster: Any) -> JobSpec:
    links = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
    fields = {"device": "a100-sxm-80g", "nodes": 4, "devices_per_node": 8} | links | cluster
    return make_job(
        {"model": MODEL, "cluster": fields, "batch": {"global_batch_size": 128}, "optimizer": {"steps": 10**5},
         "plan": {"dp": fields["nodes"] * fields["devices_per_node"] // 8, "tp": 8}}
    )  # fmt: skip


@pytest.fixture(scope="module")
def both() -> tuple[Scaling, Scaling]:
    given = job()
    return scaling(given, SIZES, batch_limits(given), best_of_few, shipped())


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_batch_of_a_device(both: tuple[Scaling, Scaling]) -> None:
    strong, weak = both
    assert [point.num_devices for point in strong.points] == [16, 32, 64]
    assert strong.misfits == weak.misfits == (1,)  # 18 bytes x 6.7e9 parameters are 112 GiB
    assert {point.job.batch.global_batch_size for point in strong.points} == {128}
    assert [point.job.batch.global_batch_size for point in weak.points] == [64, 128, 256]
    assert strong.points[1].job == weak.points[1].job  # both have the job's batch on the job's cluster
    for result in both:
        assert all(point.job.plan.world == point.num_devices for point in result.points)
        assert result.efficiency(result.points[0]) == result.memory_efficiency(result.points[0]) == 1
        assert all(0.5 < result.efficiency(point) < 1.05 for point in result.points)
    assert strong.efficiency(strong.points[-1]) < weak.efficiency(weak.points[-1])


def test_figures_are_those_of_the_plan(both: tuple[Scaling, Scaling]) -> None:
    for results in both:
        for point, row in zip(results.points, results.rows(), strict=True):
            time, memory = simulated_step(point.job, shipped()), fullest(point.job, shipped())
            assert (row["step_s"], row["mfu"], row["peak_bytes"]) == (time.total, time.mfu, memory.process)
            tokens = point.job.batch.global_batch_size * 4096
            assert row["tokens_per_s_per_device"] * point.num_devices * time.total == pytest.approx(tokens)
            hours = row["step"]["device_hours"]
            assert hours == pytest.approx(time.total * point.num_devices / 3600)
            assert row["usd_per_billion_tokens"] == pytest.approx(row["step"]["usd"] / tokens * 1e9)
            assert row["run_days"][0] * 86400 * row["tokens_per_s"] == pytest.approx(row["run_tokens"][0])
            assert row["run_usd"][1] == pytest.approx(row["usd_per_billion_tokens"] * row["run_tokens"][1] / 1e9)


def test_a_larger_batch_takes_more_tokens_by_the_critical_one(both: tuple[Scaling, Scaling]) -> None:
    strong, weak = both
    total = 10**5 * 128 * 4096
    assert all(low == high == pytest.approx(total) for low, high in strong.run_tokens)
    assert weak.run_tokens[1] == pytest.approx((total, total))
    assert weak.run_tokens[0][1] < total < weak.run_tokens[2][0] < weak.run_tokens[2][1]


def test_text_and_json_say_the_same(both: tuple[Scaling, Scaling]) -> None:
    given = job()
    text, result = scaling_text(given, both, batch_limits(given)), scaling_dict(given, both, batch_limits(given))
    assert json.loads(json.dumps(result)) == result
    assert text.count("No plan fits on 1 device.") == 2
    assert "\nMoney is counted at $2.70 a device and hour (CoreWeave, on-demand list price of February 2026)." in text
    for row in (*result["strong"], *result["weak"]):
        assert re.search(rf"^{row['devices']} .* {row['step_s']:.3g} s  +{row['tokens_per_s']:,.0f} ", text, re.M)
        assert re.search(rf"^{row['devices']}:  tp {row['plan']['tp']}, .*dp {row['plan']['dp']}, ", text, re.M)
    assert "A batch 2 times as large asks for another learning rate: with AdamW 0.0014 instead of 0.001" in text
    low, high = result["batch"]["more_tokens"]
    assert f"{100 * low:.0f} % to {100 * high:.0f} % more tokens" in text


def test_the_text_is_the_same_in_chinese(both: tuple[Scaling, Scaling], monkeypatch: pytest.MonkeyPatch) -> None:
    given = job()
    limits = batch_limits(given)
    assert_same_in_chinese(lambda language: scaling_text(given, both, limits, language), monkeypatch)


def test_the_picture_has_a_line_for_each_kind_in_each_chart(both: tuple[Scaling, Scaling]) -> None:
    root = ElementTree.fromstring(scaling_picture(job(), both))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4 * 2 + 1
    assert all(len(line.attrib["points"].split()) == 3 for line in lines)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert words.count("64") == 4 and "US dollars of 1e9 tokens" in words
    for line in lines:
        assert all(0 < float(y) < float(root.attrib["height"]) for _, y in
                   (point.split(",") for point in line.attrib["points"].split()))  # fmt: skip


def test_the_picture_has_the_same_numbers_in_chinese(
    both: tuple[Scaling, Scaling], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job()
    assert_same_in_chinese(lambda language: words_of_picture(scaling_picture(given, both, language)), monkeypatch, 80)


def test_without_a_price_there_are_device_hours(both: tuple[Scaling, Scaling]) -> None:
    given = job()
    free = [
        replace(result, points=tuple(replace(p, money=replace(p.money, usd=None)) for p in result.points))
        for result in both
    ]
    assert "device-hours of 1e9 tokens" in scaling_picture(given, free)
    assert scaling_text(given, (free[0], free[1]), batch_limits(given)).count(" unknown ") == 6
    assert all(row["run_usd"] is None for row in free[0].rows())


def test_sizes_that_can_not_be() -> None:
    given = job()
    with pytest.raises(PlanError, match=r"12 devices are not whole nodes of 8 \(12 / 8 = 1.50\); use 8 or 16"):
        scaling(given, [8, 12], batch_limits(given), best_of_few, shipped())
    with pytest.raises(PlanError, match="no plan fits on 1 device;"):
        scaling(given, [1], batch_limits(given), best_of_few, shipped())
    pod = job(topology={"torus": [4, 4, 2]})
    with pytest.raises(PlanError, match=r"16 devices are not whole copies of cluster.topology.torus 4 x 4 x 2 = 32"):
        scaling(pod, [16, 32], batch_limits(pod), best_of_few, shipped())
    unknown = given.model_copy(update={"cluster": given.cluster.model_copy(update={"device": "unknown"})})
    with pytest.raises(PlanError, match=r"cluster\.device"):
        scaling(unknown, [8], batch_limits(given), best_of_few, shipped())


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8", [8]), ("8,16, 48", [8, 16, 48]), ("64-1024", [64, 128, 256, 512, 1024]), ("24-100,8", [8, 24, 48, 96])],
)
def test_sizes_are_listed_or_doubled(text: str, sizes: list[int]) -> None:
    assert sizes_of(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "8,", "64-32", "a", "8--16", "-8", "1.5"])
def test_sizes_that_can_not_be_read(text: str) -> None:
    with pytest.raises(PlanError, match="neither a number of devices nor a range"):
        sizes_of(text)


def test_a_part_of_a_node_is_a_smaller_node() -> None:
    small, large = at_size(job(), 4, 16).cluster, at_size(job(), 64, 16).cluster
    assert (small.nodes, small.devices_per_node) == (1, 4)
    assert (large.nodes, large.devices_per_node) == (8, 8)
