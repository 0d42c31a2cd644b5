"""A cluster that states no links has those that are usual for its device; one that states its own keeps them."""

import pytest

from shardwright.cli.checked_job import load
from shardwright.config import catalog
from shardwright.config.cluster_facts import node_devices, usual_link_notes
from shardwright.cost.calibration import device_of
from shardwright.cost.from_job import run_of
from shardwright.explain.story import tell
from shardwright.planner.own_plan import estimate

ON_H100 = ("cluster.device=h100-sxm", "precision.compute=bf16")


def test_the_device_has_what_the_cluster_does_not_state() -> None:
    job = load("quickstart", (*ON_H100, "plan.dp=4"))
    run = run_of(job)
    assert (run.devices_per_node, run.node_bytes_per_s, run.network_bytes_per_s) == (8, 450e9, 50e9)
    (note,) = usual_link_notes(job.cluster, job.plan.world)
    assert "450 GB/s within a node of 8 and 50 GB/s between nodes of 8" in note
    (inside,) = usual_link_notes(job.cluster, 8)
    assert "inter_node" not in inside and "between" not in inside


def test_what_the_cluster_states_it_keeps() -> None:
    job = load("quickstart", (*ON_H100, "cluster.intra_node.bandwidth_gb_per_s=100", "cluster.devices_per_node=4",
                              "cluster.nodes=2"))  # fmt: skip
    run = run_of(job)
    assert (run.devices_per_node, run.node_bytes_per_s, run.network_bytes_per_s) == (4, 100e9, 50e9)
    (note,) = usual_link_notes(job.cluster, job.plan.world)
    assert "intra_node" not in note and "50 GB/s between nodes of 4" in note
    stated = load("llama3-405b-16k", ())
    assert usual_link_notes(stated.cluster, stated.plan.world) == []


def test_links_are_those_of_the_catalogs_clusters() -> None:
    """The same server in two entries: links within and between nodes are alike."""
    for name in ("h100-node", "llama3-h100-16384", "selene", "h800-2048", "gb200-rack", "tpu-v5p-6144"):
        cluster = catalog.read("clusters", name)
        device = device_of(cluster["device"])
        assert device.link_gb_per_s == cluster["intra_node"]["bandwidth_gb_per_s"]
        assert device.network_gb_per_s == cluster["inter_node"]["bandwidth_gb_per_s"]


def test_links_of_tpus_are_those_of_one_direction() -> None:
    """Google Cloud's documents state both directions of a chip together, in GB/s."""
    for name, both in {"tpu-v5e": 400, "tpu-v5p": 1200, "tpu-v6e": 800, "tpu-v7x": 1200}.items():
        assert device_of(name).link_gb_per_s == both / 2


def test_no_network_is_faster_than_the_links_of_a_node() -> None:
    for name in catalog.names("devices"):
        assert device_of(name).network_gb_per_s <= device_of(name).link_gb_per_s


def test_a_network_that_is_not_known_is_asked_for_where_it_is_crossed() -> None:
    alone, across = (load("quickstart", ("cluster.device=a100-pcie-80g", f"plan.dp={dp}")) for dp in (2, 4))
    assert estimate(alone).step.total > 0
    with pytest.raises(KeyError, match=r"no usual network of a100-pcie-80g; set cluster\.inter_node"):
        estimate(across)
    story = tell(across)
    assert story.step is None and "cluster.inter_node" in story.untimed
    slow, fast = (
        load(
            "quickstart", ("cluster.device=a100-pcie-80g", "plan.dp=4", f"cluster.inter_node.bandwidth_gb_per_s={rate}")
        )
        for rate in (1, 5)
    )
    assert estimate(slow).step.total > estimate(fast).step.total


def test_a_device_without_fast_links_has_no_usual_node() -> None:
    job = load("quickstart", ("cluster.device=rtx-4090",))
    assert node_devices(job.cluster) == 0 and run_of(job).devices_per_node == job.plan.world
