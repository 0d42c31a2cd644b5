"""Seconds of collectives: the algorithms that are chosen, and public measurements of collectives by themselves."""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.cluster import DeviceSpec
from shardwright.config.load import make_job
from shardwright.config.measured_table import MeasuredTable
from shardwright.config.network_facts import NETWORKS
from shardwright.config.software import software_of
from shardwright.cost.calibration import Rates, rates_of, shipped
from shardwright.cost.collective_time import (
    all_to_all_s,
    message_s,
    nccl_ring_s,
    nccl_switched_trees_s,
    ring_pass_s,
    ring_s,
)
from shardwright.cost.from_job import run_of
from shardwright.cost.measured_time import measured_device
from shardwright.cost.topology import Group, group_of, reach_of_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from collectives import MeasuredCollective, error, measured_collectives

KIB, GIB = 2**10, 2**30


def rates_with(device: str = "h100-sxm", network: str = "unknown") -> Rates:
    cluster = {"device": device, "nodes": 4, "devices_per_node": 8, "network": {"kind": network}}
    sections = {"cluster": cluster, "plan": {"dp": 32}, "batch": {"global_batch_size": 32}}
    return rates_of(run_of(make_job(sections | {"precision": {"compute": "bf16"}})), shipped())


AFTERWARDS = "-node-2"  # ends names of systems whose measurements were read after the rates were set


def test_predicted_collectives_are_near_measurements_that_no_rate_was_set_by() -> None:
    rows = [row for row in measured_collectives() if row.system.endswith(AFTERWARDS)]
    assert len(rows) == 80 and error(rows) < 0.2
    assert error([row for row in rows if row.num_bytes >= 8 * KIB**2]) < 0.12


def test_predicted_collectives_are_near_public_measurements() -> None:
    """The measured rows have kinks where NCCL changes its algorithm, so that single ones are off by up to a half."""
    by_system: dict[tuple[str, str], list[MeasuredCollective]] = defaultdict(list)
    for row in measured_collectives():
        if not row.system.endswith(AFTERWARDS):
            by_system[row.system, row.collective].append(row)
    errors = {key: error(rows) for key, rows in by_system.items()}
    sums_in_network = errors.pop(("abci-sharp", "all_reduce"))  # another algorithm, which predictions do not have
    assert max(errors.values()) < 0.3, errors
    assert np.median(list(errors.values())) < 0.08
    assert sums_in_network < 0.8


def test_large_sums_over_hundreds_of_nodes_take_as_long_as_measured() -> None:
    """512 to 8,192 H100 over InfiniBand: trees between nodes reach what a ring would, without its steps."""
    rows = [row for row in measured_collectives() if row.system == "eos" and row.num_devices >= 512]
    large, small = ([row for row in rows if (row.num_bytes >= GIB) == is_large] for is_large in (True, False))
    assert len(large) == 21 and error(large) < 0.03 and all(0.85 < row.ratio < 1.05 for row in large)
    assert error(small) < 0.05
    smallest = [row for row in measured_collectives() if row.system == "eos" and row.num_bytes <= 32 * KIB**2]
    assert len(smallest) == 34 and error(smallest) < 0.1 and all(0.85 < row.ratio < 1.3 for row in smallest)


def test_each_level_of_trees_over_switches_takes_a_latency_and_its_chunks() -> None:
    """NCCL's NVLSTree: 20.9 us, and 16 channels x 8 ranks x 64 KiB over the eight ports of a node."""
    rates = rates_with(network="infiniband")
    few, many = (group_of(8 * nodes, 1, reach_of_ranks(8)) for nodes in (64, 128))
    chunks_s = 16 * 8 * 2**16 / (8 * rates.network_bytes_per_s)
    seconds = [float(nccl_switched_trees_s(rates, group, GIB)) for group in (few, many)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * (20.9e-6 + chunks_s))
    for others in (rates_with(network="efa"), rates_with("a100-sxm-80g", "infiniband")):
        assert np.isinf(nccl_switched_trees_s(others, few, GIB))
    assert np.isinf(nccl_switched_trees_s(rates, group_of(8, 1, reach_of_ranks(8)), GIB))


def test_gathers_over_nodes_with_one_rank_each_take_aggregated_trees() -> None:
    """NCCL's own model (src/graph/tuning.cc): part of a step for each doubling of the nodes, 2.8 us for each rank."""
    rates = replace(rates_with(network="infiniband"), aggregated_trees=True)
    by_ring = replace(rates, aggregated_trees=False)
    alone = group_of(64, 1, reach_of_ranks(1))
    expected_s = rates.collective_s + 6 * rates.network_latency_s / 3.5 + 64 * 2.8e-6
    assert ring_s(rates, alone, 64) == pytest.approx(expected_s, rel=1e-3)
    assert ring_s(by_ring, alone, 64) > 4 * expected_s
    for size, scatters, group in ((GIB, True, alone), (KIB, False, group_of(64, 1, reach_of_ranks(8)))):
        assert ring_s(rates, group, size, scatters=scatters) == ring_s(by_ring, group, size, scatters=scatters)
    assert ring_s(rates, alone, KIB, 2) == ring_s(by_ring, alone, KIB, 2)


def test_only_software_with_a_new_nccl_has_aggregated_trees() -> None:
    has_them = [name for name in catalog.names("software") if software_of(name).aggregated_trees]
    assert has_them == [
        *("automodel", "megatron-bridge", "megatron-core", "primus", "shardwright"),
        *("torchtitan-2025", "torchtitan-2026"),
    ]


@pytest.mark.parametrize("network", NETWORKS)
def test_an_all_reduce_is_never_slower_than_a_scatter_and_a_gather(network: str) -> None:
    rates = rates_with(network=network)
    for size in (KIB, KIB**2, GIB):
        group = group_of(32, 1, reach_of_ranks(8))
        apart_s = ring_s(rates, group, size, scatters=True) + ring_s(rates, group, size)
        assert ring_s(rates, group, size, 2) <= apart_s


def test_switches_sum_within_a_domain_of_hopper_and_not_of_ampere() -> None:
    for device, gain in (("h100-sxm", 1.2), ("a100-sxm-80g", 1.0)):
        rates, node = rates_with(device), group_of(8, 1, reach_of_ranks(8))
        assert 2 * ring_s(rates, node, GIB) / ring_s(rates, node, GIB, 2) == pytest.approx(gain, abs=0.1)


def test_the_latency_of_a_gather_grows_with_ranks_and_of_an_all_reduce_with_their_logarithm() -> None:
    rates = rates_with()
    few, many = (group_of(size, 1, reach_of_ranks(8)) for size in (64, 1024))
    gathers = [float(ring_s(rates, group, KIB)) - rates.collective_s for group in (few, many)]
    sums = [float(ring_s(rates, group, KIB, 2)) - rates.collective_s for group in (few, many)]
    assert gathers[1] / gathers[0] == pytest.approx(16, rel=0.05)
    assert 1.5 < sums[1] / sums[0] < 3


@given(st.sampled_from(sorted(NETWORKS)), st.integers(0, 40), st.integers(0, 10))
def test_more_bytes_or_ranks_never_take_less_time(network: str, log_bytes: int, log_ranks: int) -> None:
    rates, size = rates_with(network=network), 2.0**log_bytes
    group, larger = (group_of(2**log, 1, reach_of_ranks(8)) for log in (log_ranks, log_ranks + 1))
    for seconds in (
        lambda group, size: ring_s(rates, group, size),
        lambda group, size: all_to_all_s(rates, group, size),
        lambda group, size: ring_pass_s(rates, group, size),
    ):
        assert 0 <= seconds(group, size) <= seconds(group, 2 * size)
        assert seconds(group, size) <= seconds(larger, size)


def test_a_message_and_a_ring_of_keys_have_the_latency_of_the_links_that_they_cross() -> None:
    rates = rates_with(network="efa")
    node, nodes = Group(8, 8), Group(8, 1)
    assert message_s(rates, nodes, 1.0) - message_s(rates, node, 1.0) == pytest.approx(
        NETWORKS["efa"].step_s - rates.link_latency_s, rel=1e-3
    )
    assert ring_pass_s(rates, nodes, 8.0) - ring_pass_s(rates, node, 8.0) == pytest.approx(
        7 * (NETWORKS["efa"].step_s - rates.link_latency_s), rel=1e-3
    )


def test_each_round_of_a_ring_of_keys_has_the_latency_of_its_hops() -> None:
    rates, nodes = rates_with(network="efa"), Group(8, 1)
    one, two = (float(ring_pass_s(rates, nodes, 1e-6, rounds)) for rounds in (1, 2))
    assert two == pytest.approx(2 * one, rel=1e-6)  # so few bytes take no time
    assert float(ring_pass_s(rates, nodes, 1e12, 2)) == pytest.approx(float(ring_pass_s(rates, nodes, 1e12)), rel=1e-3)


def test_a_ring_between_two_ranks_is_one_hop() -> None:
    """One rank a node: with n ranks a part takes n - 1 of the ring's hops, all of them over the network."""
    rates = rates_with(network="efa")
    two, four = (float(nccl_ring_s(rates, Group(n, 1), 1e-9, rounds=1)) - rates.collective_s for n in (2, 4))
    assert four == pytest.approx(3 * two) == pytest.approx(3 * rates.network_latency_s)


@pytest.mark.parametrize(("kind", "rounds", "scatters"), [("all_gather", 1, False), ("all_reduce", 2, False)])
@pytest.mark.parametrize("number", ["float32", "bf16"])
def test_one_measured_collective_leaves_the_others_computed(
    kind: str, rounds: int, scatters: bool, number: str
) -> None:
    """A device's file may have the table of one collective alone, and in one number type."""
    table = MeasuredTable(work=kind, number=number, sizes=[[2.0], [1.0, 1e9]], seconds=[1e-9, 1.0])
    measured = measured_device(DeviceSpec(name="mine", memory_gib=1.0, measured=[table]))
    computed = replace(rates_with(network="efa"), number="bf16")
    rates, pair = replace(computed, measured=measured), Group(2, 2)
    assert float(ring_s(rates, pair, 1e6, rounds, scatters)) == pytest.approx(1e-3)
    other = 3 - rounds
    assert float(ring_s(rates, pair, 1e6, other, True)) == float(ring_s(computed, pair, 1e6, other, True))
