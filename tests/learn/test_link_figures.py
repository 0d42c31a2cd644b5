"""Figures of links name what the catalog has."""

from shardwright.config.cluster_facts import device_entry
from shardwright.learn.ladder_figure import rungs
from shardwright.learn.network_shapes_figure import network_shapes


def test_a_rung_is_called_as_the_source_of_its_device_says() -> None:
    hosts = [rung.name.split(", ") for rung in rungs() if rung.name.startswith("PCIe ") and not rung.reached]
    assert len(hosts) == 3
    assert all(generation in device_entry(device).source for generation, device in hosts)


def test_collectives_reach_less_than_is_stated() -> None:
    assert all(rung.reached < rung.stated for rung in rungs())


def test_a_torus_is_slow_for_all_to_alls_alone() -> None:
    tree, narrow, torus = network_shapes()
    assert abs(torus.all_reduce_s / tree.all_reduce_s - 1) < 0.05
    # Half of the data of half of the ranks crosses the middle, over 2 x 8 links of a quarter of a device's bandwidth.
    assert 3.8 < torus.all_to_all_s / tree.all_to_all_s < 4.2
    assert narrow.all_to_all_s > 3 * tree.all_to_all_s
