"""A job on several clusters side by side: the screen, the best of each kind, and clusters on which nothing fits."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.api.compared import Compared, offered_clusters
from shardwright.config.asked_cluster import AskedCluster
from shardwright.report.cluster_comparison import ClusterPlan, best_index
from support.languages import assert_same_in_chinese

KEPT = ["plan.tp=1", "plan.pp=1", "plan.cp=1", "plan.microbatch_size=1", "plan.recompute=none"]
ON = ["h100-sxm:16", "rtx-4090:1x8", "b200-sxm:8@3.25"]


@pytest.fixture(scope="module")
def comparison() -> Compared:
    """A model on two clusters that have room for it, and on one that has not."""
    return sw.load("llama3-8b", devices=8, device="h100-sxm").compare(ON, keep=KEPT, tokens=2e12)


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_clusters_are_side_by_side_on_one_screen(
    comparison: Compared, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = comparison.screen().splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "a run of 2e12 tokens" in text and "Predicted, not measured" in text
    for label in ("plan", "step", "tokens/s/device", "MFU", "memory", "days", "money", "energy", "links", "price"):
        assert any(line.startswith(f"{label}  ") for line in lines), label
    assert "8 rtx-4090: No plan fits." in text and "none fits" in text
    if columns >= 100:
        assert len(lines) <= 45
        (heading,) = (line for line in lines if line.startswith("     ") and "16 h100-sxm" in line)
        assert "8 rtx-4090" in heading and "8 b200-sxm at $3.25" in heading


def test_the_screen_is_the_same_in_chinese(comparison: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert_same_in_chinese(lambda language: comparison.screen(language=language), monkeypatch)


def test_the_cluster_with_the_least_is_named(comparison: Compared) -> None:
    totals = [cluster.run_totals for cluster in comparison.clusters]
    data = comparison.to_dict()
    for goal, total in (("cheapest", "usd"), ("fastest", "days"), ("least_energy", "kwh")):
        amounts = {number: one[total] for number, one in enumerate(totals) if one[total] is not None}
        assert amounts.keys() == {0, 2}  # nothing fits on the other
        assert data[goal] == best_index(comparison.clusters, total) == min(amounts, key=lambda n: amounts[n] or 0.0)
    best, other = comparison.clusters[data["cheapest"]], comparison.clusters[2 - data["cheapest"]]
    ratio = (other.run_totals["usd"] or 0.0) / (best.run_totals["usd"] or 1.0)
    assert f"Cheapest: {best.name} ({other.name} {100 * (ratio - 1):.0f} % more)." in comparison.text
    assert "\x1b[32m" in comparison.screen(coloured=True) and "\x1b" not in comparison.text


def test_a_price_has_its_date_and_holds_for_its_cluster(comparison: Compared) -> None:
    first, _, last = comparison.to_dict()["clusters"]
    assert first["usd_per_device_hour"] == 6.16 and "February 2026" in first["price"]
    assert last["usd_per_device_hour"] == 3.25
    run = last["plan"]["run"]
    assert run["usd"] == pytest.approx(run["device_hours"] * 3.25)
    assert run["days"] == pytest.approx(run["device_hours"] / 8 / 24)


def test_each_plan_is_the_one_that_is_recommended(comparison: Compared) -> None:
    job = sw.load("llama3-8b", devices=16, device="h100-sxm")
    recommended = job.plan(keep=KEPT, tokens=2e12).dicts()[0]
    shown = comparison.to_dict()["clusters"][0]["plan"]
    assert shown == {name: recommended[name] for name in shown}


def test_steps_of_different_batches_say_so() -> None:
    comparison = sw.load("tiny-llama", devices=8, device="h100-sxm").compare(
        ["h100-sxm:8", "a100-sxm-80g:24"], keep=KEPT
    )
    first, second = (cluster.job.tokens_per_step for cluster in comparison.clusters)
    assert first != second
    (line,) = (line for line in comparison.text.splitlines() if line.startswith("batch"))
    assert line.count("sequences, bf16") == 2


def test_a_cluster_without_a_legal_plan_is_a_column_and_none_on_all_is_a_fault() -> None:
    job = sw.load("tiny-llama", "batch.global_batch_size=8", devices=8, device="h100-sxm")
    refused = job.compare(["h100-sxm:8", "h100-sxm:1024"], keep=KEPT)
    assert [bool(cluster.plan) for cluster in refused.clusters] == [True, False]
    assert "1,024 h100-sxm: " in refused.text and refused.to_dict()["clusters"][1]["refusal"]
    with pytest.raises(sw.PlanError, match=r"1,024 h100-sxm: .*\n.*2,048 h100-sxm: "):
        job.compare(["h100-sxm:1024", "h100-sxm:2048"], keep=KEPT)


def test_unknown_amounts_are_not_the_least(comparison: Compared) -> None:
    cluster = comparison.clusters[0]
    assert cluster.plan is not None
    unpriced = replace(cluster, plan=replace(cluster.plan, money=replace(cluster.plan.money, usd=None)))
    clusters: list[ClusterPlan] = [unpriced, cluster]
    assert best_index(clusters, "usd") == 1 and best_index([unpriced], "usd") is None
    text = Compared((unpriced, unpriced), ()).text
    assert "Cheapest: unknown." in text


def test_a_fault_of_the_run_is_told_once() -> None:
    with pytest.raises(sw.PlanError, match="--tokens is -1") as error:
        sw.load("tiny-llama", devices=8, device="h100-sxm").compare(["h100-sxm:8", "b200-sxm:8"], tokens=-1.0)
    assert len(error.value.faults) == 1


def test_a_cluster_may_say_its_nodes_and_its_price() -> None:
    usual, own = offered_clusters(["h100-sxm:64", "rtx-4090:3x4@0.5"])
    assert (usual.cluster, usual.usd) == (AskedCluster(64, "h100-sxm"), "")
    assert (own.cluster, own.usd) == (AskedCluster(12, "rtx-4090", 4), "0.5")


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (["h100-sxm:8"], ["1 cluster has none to be compared with"]),
        (["h100-sxm", "b200-sxm:8"], ["--on 'h100-sxm' is no cluster"]),
        (["h100-smx:8", "b200:x"], ["--on 'h100-smx:8': 'h100-smx' is not in the catalog", "--on 'b200:x' is no"]),
        (["h100-sxm:0", "b200-sxm:8@cheap", ""], ["'h100-sxm:0'", "'b200-sxm:8@cheap'", "''"]),
        ([], ["no cluster is named; use --on twice"]),
    ],
)
def test_clusters_are_read_and_every_fault_is_told(names: list[str], faults: list[str]) -> None:
    with pytest.raises(sw.PlanError) as error:
        offered_clusters(names)
    assert len(error.value.faults) == len(faults)
    assert all(part in fault for part, fault in zip(faults, error.value.faults, strict=True))


@pytest.mark.parametrize(
    ("on", "override", "fault"),
    [
        (["h100-sxm:8", "h1000:8"], "batch.global_batch_size=8", "h1000"),
        (
            ["h100-sxm:8", "b200-sxm:12"],
            "batch.global_batch_size=8",
            r"12 devices are not whole nodes of 8 \(12 / 8 = 1.50\); use b200-sxm:8 or b200-sxm:16, or write",
        ),
        (
            ["h100-sxm:8", "rtx-4090:8"],
            "batch.global_batch_size=8",
            r"usual node of rtx-4090; write the nodes, such as --on rtx-4090:1x8",
        ),
        (["h100-sxm:8", "b200-sxm:8@1.2.3"], "batch.global_batch_size=8", "usd_per_device_hour"),
        (["h100-sxm:8", "b200-sxm:8"], "cluster.nodes=2", "would hold on every cluster"),
    ],
)
def test_faults_of_a_cluster_are_refused(on: list[str], override: str, fault: str) -> None:
    with pytest.raises(sw.PlanError, match=fault):
        sw.load("tiny-llama", override, devices=16, device="h100-sxm").compare(on)
