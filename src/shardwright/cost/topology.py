"""Which links a group of ranks crosses: fast links within a domain, switches above the nodes, the rings of a torus.

Ranks are laid out with the fastest axis of the plan innermost, so a group is `size` ranks that lie `stride` apart.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.workload.arrays import Numbers
from shardwright.workload.query import Topology

_FLAT = Topology()


@dataclass(frozen=True)
class Group:
    """`size` ranks, of which `inside` lie in one domain of fast links. Numbers may be arrays.

    `upper` has, for each level of switches, how many of them lie below one switch and what share of the bandwidth goes
    on upward. In a torus `lanes` is the share of a device's links that the rings of the group use, and `hops` how
    often all that a rank sends to all others passes a device's links.
    """

    size: Numbers
    inside: Numbers
    upper: tuple[tuple[Numbers, float], ...] = ()
    lanes: Numbers = 1.0
    hops: Numbers = 0.0

    @property
    def domains(self) -> Numbers:
        """Domains that it crosses."""
        return -(-self.size // self.inside)

    @property
    def ports(self) -> Numbers:
        """Network ports that a ring through all its domains has, at the narrowest of the levels that it crosses.

        A ring leaves each switch once. The groups whose ranks lie below one switch share its links upward, each in
        proportion to its ranks there.
        """
        return self._narrowed(self.inside)

    def _narrowed(self, ports: Numbers) -> Numbers:
        """Ports, or fewer where a level that is crossed has fewer upward."""
        for below, share in self.upper:
            ports = np.where(below < self.size, np.minimum(ports, below * share), ports)
        return ports

    def upward(self, topk_copies: Numbers = 1.0) -> Numbers:
        """How much of what a rank sends to all others alike passes its port, in units of a full port: the narrowest."""
        found = topk_copies * (self.size - self.inside) / self.size
        for below, share in self.upper:
            found = np.maximum(found, topk_copies * np.maximum(0, self.size - below) / self.size / share)
        return found

    @property
    def stretch(self) -> Numbers:
        """How much longer than over a full port messages between neighbours take, in the mean over their borders.

        Of the `below` ranks below a switch one sends upward, and has the share of all of them.
        """
        found: Numbers = 1.0
        for below, share in self.upper:
            crossing = (-(-self.size // below) - 1) / np.maximum(1, self.size - 1)
            found = np.maximum(found, 1 + crossing * (1 / np.minimum(1, below * share) - 1))
        return found

    @property
    def narrowest(self) -> Numbers:
        """Share of a port's bandwidth that a ring's slowest step has, for which all others wait."""
        return self._narrowed(1.0)


def group_of(size: Numbers, stride: Numbers, domain: int, topology: Topology = _FLAT) -> Group:
    """The group of `size` ranks, `stride` apart, where `domain` neighbours share fast links."""

    def within(devices: int) -> Numbers:
        return np.maximum(1, np.minimum(size, devices // stride))

    inside = within(domain)
    upper = tuple((within(devices), share) for devices, share in topology.levels)
    return Group(size, inside, upper, *(_on_torus(inside, stride, topology.torus) if topology.torus else ()))


def _on_torus(size: Numbers, stride: Numbers, torus: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """(share of a device's links that rings of `size` ranks use, how often an all-to-all passes one link).

    Along an axis that a group fills it has a ring, both ways; of a part of it a line, whose ends meet on the way back.
    Groups that lie between each other's ranks share its links. With rings on several axes each carries its part (Jouppi
    et al. 2023, arXiv 2304.01433, section 2). An all-to-all of n ranks passes each link n / 8 times what a rank sends
    on a ring and n / 4 times on a line (its bisection), of the longest axis.
    """
    links = 2 * len(torus)
    lanes, hops, first = 0.0 * size, 0.0 * size, 1
    for length in torus:
        end = first * length
        begin = np.clip(stride, first, end)
        along = np.maximum(1, np.minimum(stride * size, end) // begin)
        between = begin // first
        is_ring = (along * between == length) & (length > 2)
        lanes = lanes + np.where(along > 1, np.where(is_ring, 2, 1) / between, 0.0)
        hops = np.maximum(hops, np.where(along > 1, along * between / np.where(is_ring, 8, 4), 0.0))
        first = end
    return np.maximum(lanes, 1) / links, hops * links
