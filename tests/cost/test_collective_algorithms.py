"""Seconds of a collective by algorithm: alpha + n / beta on one node, and the same that predictions take."""

import math
from typing import Any

import pytest

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.cost.collective_algorithms import PricedAlgorithm, PricedCollective
from shardwright.cost.collective_time import ring_s

SIZE = 2**30


def priced(kind: Any, ranks: int, **fields: Any) -> PricedCollective:
    return one_collective(CollectiveQuestion(kind, SIZE, ranks, **fields)).priced


def row(collective: PricedCollective, name: str) -> PricedAlgorithm:
    return next(row for row in collective.rows if row.name == name)


def test_one_node_takes_alpha_and_beta() -> None:
    collective = priced("all-reduce", 8)
    rates, n = collective.rates, 8
    ring, halving = row(collective, "ring"), row(collective, "halving-doubling")
    bytes_s = 2 * SIZE * (n - 1) / n / rates.link_bytes_per_s
    assert (ring.num_steps, halving.num_steps) == (2 * (n - 1), 2 * math.log2(n))
    for algorithm in (ring, halving):
        alpha_s = rates.collective_s + algorithm.num_steps * rates.link_latency_s
        assert algorithm.seconds == pytest.approx(alpha_s + bytes_s, rel=1e-12)
        assert algorithm.inside_bytes == 2 * SIZE * (n - 1) / n and algorithm.out_bytes == 0


@pytest.mark.parametrize("ranks", [8, 32, 1024])
def test_predictions_take_the_row_with_the_mark(ranks: int) -> None:
    collective = priced("all-reduce", ranks)
    marked = [row for row in collective.rows if row.is_predicted]
    assert len(marked) == 1
    assert marked[0].seconds == float(ring_s(collective.rates, collective.group, SIZE, 2))


@pytest.mark.parametrize(
    ("device", "ranks", "name"),
    [
        ("h100-sxm", 8, "switch"),
        ("h100-sxm", 16, "switch, trees"),
        ("h100-sxm", 4, "two trees"),
        ("a100-sxm-80g", 8, "two trees"),
        ("h100-pcie", 8, "two trees"),
    ],
)
def test_a_sum_in_switches_is_called_so(device: str, ranks: int, name: str) -> None:
    """Switches of NVLink from Hopper on sum, for five ranks of a node or more; those of PCIe do not."""
    collective = priced("all-reduce", ranks, device=device)
    names = {row.name for row in collective.rows} & {"two trees", "switch", "switch, trees"}
    assert names == {name}
    sent_bytes = row(collective, name).inside_bytes
    inside = min(ranks, 8)
    assert sent_bytes == (2 * SIZE * (inside - 1) / inside if name == "two trees" else SIZE)
    for algorithm in collective.rows:  # none is faster than its own bytes
        assert algorithm.seconds > algorithm.inside_bytes / collective.rates.link_bytes_per_s * (1 - 1e-9)


def test_small_gathers_over_nodes_with_one_rank_each_take_aggregated_trees() -> None:
    def marked(num_bytes: int, **fields: int) -> list[str]:
        rows = one_collective(CollectiveQuestion("all-gather", num_bytes, 32, **fields)).priced.rows
        return [row.name for row in rows if row.is_predicted]

    assert marked(4096, devices_per_node=1) == ["aggregated trees"]
    assert marked(SIZE, devices_per_node=1) == marked(4096) == ["ring"]


def test_a_root_sends_through_one_port_and_a_hierarchy_through_all() -> None:
    scatter, all_reduce = priced("scatter", 16), priced("all-reduce", 16)
    assert row(scatter, "direct").seconds > SIZE / 2 / scatter.rates.network_bytes_per_s
    hierarchical = row(all_reduce, "hierarchical")
    assert hierarchical.out_bytes == SIZE  # twice the half that the other node has to get
    assert hierarchical.seconds < SIZE / all_reduce.rates.network_bytes_per_s
    assert row(all_reduce, "ring").out_bytes == 2 * SIZE * 15 / 16


def test_large_groups_have_the_rows_of_predictions() -> None:
    collective = priced("all-reduce", 0, cluster="llama3-h100-8192")
    assert collective.num_ranks == 8192 and [row.name for row in collective.rows] == ["ring", "switch, trees"]
    assert collective.steps == [] and priced("scatter", 512).rows == []


@pytest.mark.parametrize(("ranks", "network_gb_per_s"), [(16, 50), (16, 6.25), (64, 50), (64, 400)])
def test_a_hierarchy_beats_rings_through_all_ports_as_its_page_says(ranks: int, network_gb_per_s: float) -> None:
    """Fewer steps and fewer bytes between nodes, against links and network one after the other."""
    override = f"cluster.inter_node.bandwidth_gb_per_s={network_gb_per_s}"
    for power in (21, 24, 27, 30, 33):
        question = CollectiveQuestion("all-reduce", 2**power, ranks, overrides=(override,))
        collective = one_collective(question).priced
        rates, nodes, node = collective.rates, float(collective.group.domains), float(collective.group.inside)
        link, port = rates.link_bytes_per_s, rates.network_bytes_per_s
        a_hierarchy = (node - 1) / (node * link) + (nodes - 1) / (ranks * port)
        bytes_s = 2**power * (a_hierarchy - (ranks - 1) / (ranks * min(link, node * port)))
        steps_s = (nodes - 1) * (node - 1) * rates.link_latency_s + rates.network_latency_s
        if not 0.5 < bytes_s / steps_s < 2:
            wins = row(collective, "hierarchical").seconds < row(collective, "ring").seconds
            assert wins == (bytes_s < steps_s), (power, bytes_s, steps_s)
