"""The registry of networks between nodes by name. The facts of each are a file in config/networks."""

from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """The facts of a kind of network that joins nodes.

    - `place` orders lists of networks; `title` is its name in texts, empty if nobody knows it.
    - `nccl_net` is the value of NCCL_NET that selects it, empty if none does; `adapter` is the name of an adapter
      whose names NCCL_IB_HCA lists, empty if NCCL does not take names.
    - `share` of a port's bandwidth is what large collectives of NCCL reach, and `port_gb_per_s` the most that a port of
      100 Gbit/s carries; what nodes share of a faster one is taken to be several such.
    - `step_s` is the latency of one step between nodes, of a ring or a tree. `peer_s` is the time that an all-to-all
      takes longer for each further rank.
    - `switched_trees`: NCCL sums by trees over nodes inside which switches sum.
    - `source` of these facts.
    """

    name: str
    place: int
    title: str = ""
    nccl_net: str = ""
    adapter: str = ""
    share: float
    port_gb_per_s: float = inf
    step_s: float
    peer_s: float
    switched_trees: bool = False  # on EFA and TCPXO sums take as long as by its other trees
    source: str

    def bytes_per_s(self, stated_bytes_per_s: float, devices_per_node: int) -> float:
        """Bytes/s of a device that large collectives reach, of those that its network is stated to have."""
        if self.port_gb_per_s == inf:
            return stated_bytes_per_s * self.share
        ports = ceil(round(stated_bytes_per_s * devices_per_node / _PORT, 6))
        return min(stated_bytes_per_s * self.share, ports * self.port_gb_per_s * 1e9 / devices_per_node)


_PORT = 12.5e9  # bytes/s of a port of 100 Gbit/s


NETWORKS: Registry[NetworkFacts] = Registry("a network", "shardwright.config.networks", NetworkFacts)
NetworkName = Annotated[str, NameOf(NETWORKS)]
