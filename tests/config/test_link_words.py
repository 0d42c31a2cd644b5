"""Outputs name a cluster's links as its fields do: a torus has no nodes, and NVLink is where a device has it."""

import re

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.cluster import ClusterSpec, LinkSpec, NetworkSpec, PartSpec, TopologySpec
from shardwright.config.cluster_facts import device_entry
from shardwright.config.link_words import domain_phrase, link_words

# Devices that are sold without NVLink, and words of theirs.
_OTHERS = {"tpu-v5e": "ICI", "mi300x": "Infinity Fabric", "gaudi2": "Ethernet (RoCE)", "l40s": "PCIe"}


def messages(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.output
    return done.output


# Of few plans the best is soon found.
KEPT = ("tp=1", "pp=1", "cp=1", "microbatch_size=1", "recompute=none", "offload_optimizer=0.0")
QUICK = [word for field in KEPT for word in ("--set", f"plan.{field}")]


def words_in(output: str) -> set[str]:
    return set(re.findall(r"\b(?:nodes?|NVLink|InfiniBand|GPUs?|NCCL|CUDA)\b", output))


@pytest.mark.parametrize("command", ["estimate", "explain", "simulate"])
def test_torus_has_no_nodes(command: str) -> None:
    assert not words_in(messages(command, "gemma2-27b-tpu"))


def test_torus_has_no_nodes_in_a_plan() -> None:
    output = messages("plan", "gpt2", "--devices", "16", "--device", "tpu-v5e", "--keep", "plan.pp=1")
    assert not words_in(output.replace("devices_per_node", "").replace("node-aware", ""))


@pytest.mark.parametrize("device", _OTHERS)
def test_links_have_their_own_name(device: str) -> None:
    output = " ".join(messages("explain", "gpt2-xl", "--devices", "8", "--device", device, *QUICK).split())
    assert f"All groups stay on {_OTHERS[device]}." in output
    assert not words_in(output) & {"NVLink", "InfiniBand"}


def test_network_is_named_where_the_cluster_says_it() -> None:
    words = ["explain", "gpt2", "--devices", "16", "--device", "h100-sxm", *QUICK]
    assert "stays on NVLink; one on several crosses the network." in " ".join(messages(*words).split())
    more = ["--set", "cluster.network.kind=infiniband", "--set", "cluster.intra_node.bandwidth_gb_per_s=25"]
    output = " ".join(messages(*words, *more).split())
    assert "stays on its fast links; one on several crosses the network (InfiniBand)." in output


def test_every_device_names_its_links() -> None:
    for name in catalog.names("devices"):
        device = device_entry(name)
        assert bool(device.link_name) == (name != "laptop-cpu"), name
        assert (device.domain == "slice") == name.startswith("tpu"), name


def test_words_of_clusters() -> None:
    torus = TopologySpec(torus=[2, 4])
    own = link_words(ClusterSpec(device="unknown", devices_per_node=8, topology=torus))
    assert (own.domain, own.domains, own.link) == ("torus", "tori", "")
    parts = [PartSpec(device=name, devices_per_node=8) for name in ("h100-sxm", "a100-sxm-80g")]
    assert link_words(ClusterSpec(parts=parts)).link == "NVLink"
    parts.append(PartSpec(device="mi300x", devices_per_node=8))
    mixed = link_words(ClusterSpec(parts=parts, network=NetworkSpec(kind="roce")))
    assert (mixed.link, mixed.network, mixed.between) == ("", "RoCE", "between nodes")
    other = ClusterSpec(device="h100-sxm", intra_node=LinkSpec(bandwidth_gb_per_s=25.0))
    assert link_words(other).link == ""
    assert domain_phrase(ClusterSpec(device="tpu-v5e", devices_per_node=8, topology=torus)) == (
        "a slice of 8 devices, a torus of 2 x 4"
    )
