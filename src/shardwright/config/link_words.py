"""The words for a cluster's domains of fast links, for these links and for its network, as its fields say them."""

from dataclasses import dataclass

from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.units import counted
from shardwright.config.usual_links import device_entry, node_devices

_NETWORKS = {"infiniband": "InfiniBand", "roce": "RoCE", "tcp": "TCP"}


@dataclass(frozen=True)
class LinkWords:
    """`domain` is "node", or "slice" or "torus" where devices are joined so; `link` and `network` are names such as
    "NVLink" and "InfiniBand", empty where nothing says them."""

    domain: str
    link: str
    network: str

    @property
    def domains(self) -> str:
        """The plural."""
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
    """The words of a cluster. A device's name of its links holds where the cluster states no other bandwidth."""
    known = [part.device for part in cluster.parts] or [cluster.device]
    devices = [device_entry(name) for name in dict.fromkeys(known) if name != "unknown"]
    domains = {device.domain for device in devices}
    domain: str = domains.pop() if len(domains) == 1 else "node"
    if cluster.topology.torus and domain == "node":
        domain = "torus"
    links = {_link(cluster, device) for device in devices}
    return LinkWords(domain, links.pop() if len(links) == 1 else "", _NETWORKS.get(cluster.network.kind, ""))


def _link(cluster: ClusterSpec, device: DeviceSpec) -> str:
    parts = [part.intra_node for part in cluster.parts if device_entry(part.device) == device]
    stated = {link.bandwidth_gb_per_s for link in parts or [cluster.intra_node]} - {0.0}
    return device.link_name if stated <= {device.link_gb_per_s} else ""


def domain_text(cluster: ClusterSpec) -> str:
    """ "a node of 8 devices", "a slice of 6,144 devices, a torus of 8 x 24 x 32"; empty where it is not known."""
    if not (size := node_devices(cluster)):
        return ""
    lengths = " x ".join(map(str, cluster.topology.torus))
    return f"a {link_words(cluster).domain} of {counted(size, 'device')}" + (
        f", a torus of {lengths}" if lengths else ""
    )
