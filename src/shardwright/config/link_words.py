"""The words for a cluster's domains of fast links, for the links and for the network, from the cluster's fields."""

from dataclasses import dataclass

from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.cluster_facts import device_entry, node_devices
from shardwright.config.network_facts import NETWORKS
from shardwright.config.phrase import fixed, say
from shardwright.config.units import counted_phrase


@dataclass(frozen=True)
class LinkWords:
    """Words: `domain` is "node", "slice" or "torus"; `link` and `network` are names such as "NVLink" and "InfiniBand",
    empty if unknown."""

    domain: str
    link: str
    network: str

    @property
    def domains(self) -> str:
        """The plural of the domain: "nodes"."""
        return "tori" if self.domain == "torus" else f"{self.domain}s"

    @property
    def inside(self) -> str:
        """ "inside a node"."""
        return f"inside a {self.domain}"

    @property
    def between(self) -> str:
        """ "between nodes"."""
        return f"between {self.domains}"


def link_words(cluster: ClusterSpec) -> LinkWords:
    """The words of a cluster. The link name of a device is used if the cluster states no other bandwidth."""
    names = [part.device for part in cluster.parts] or [cluster.device]
    devices = [device_entry(name) for name in dict.fromkeys(names) if name != "unknown"]
    domains = {device.domain for device in devices}
    domain: str = domains.pop() if len(domains) == 1 else "node"
    if cluster.topology.torus and domain == "node":
        domain = "torus"
    links = {_link(cluster, device) for device in devices}
    return LinkWords(domain, links.pop() if len(links) == 1 else "", NETWORKS[cluster.network.kind].title)


def _link(cluster: ClusterSpec, device: DeviceSpec) -> str:
    parts = [part.intra_node for part in cluster.parts if device_entry(part.device) == device]
    stated = {link.bandwidth_gb_per_s for link in parts or [cluster.intra_node]} - {0.0}
    return device.link_name if stated <= {device.link_gb_per_s} else ""


def domain_phrase(cluster: ClusterSpec) -> str:
    """ "a node of 8 devices", "a slice of 6,144 devices, a torus of 8 x 24 x 32"; empty if unknown."""
    if not (size := node_devices(cluster)):
        return ""
    domain, devices = fixed(link_words(cluster).domain), counted_phrase(size, "device")
    if lengths := " x ".join(map(str, cluster.topology.torus)):
        return say("a {domain} of {devices}, a torus of {lengths}", domain=domain, devices=devices, lengths=lengths)
    return say("a {domain} of {devices}", domain=domain, devices=devices)
