"""The links that a group of ranks crosses: fast links within a domain, switches above the nodes, the rings of a torus.

Ranks are laid out axis by axis, so a group is `size` ranks that lie `stride` apart: among all ranks, or among those of
a stage, whose blocks may have the other stages of a pipeline between them (config/rank_order.py).
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.rank_order import Degrees
from shardwright.sharding.groups import of_stage
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
        copies = topk_copies * (self.size - self.inside) / self.size
        for below, share in self.upper:
            copies = np.maximum(copies, topk_copies * np.maximum(0, self.size - below) / self.size / share)
        return copies

    @property
    def stretch(self) -> Numbers:
        """How much longer than over a full port messages between neighbours take, in the mean over their borders.

        Of the `below` ranks below a switch one sends upward, and has the share of all of them.
        """
        factor: Numbers = 1.0
        for below, share in self.upper:
            crossing = (-(-self.size // below) - 1) / np.maximum(1, self.size - 1)
            factor = np.maximum(factor, 1 + crossing * (1 / np.minimum(1, below * share) - 1))
        return factor

    @property
    def narrowest(self) -> Numbers:
        """Share of a port's bandwidth that a ring's slowest step has, for which all others wait."""
        return self._narrowed(1.0)


@dataclass(frozen=True)
class Reach:
    """How many places are among the devices of a domain of fast links, and with what share upward below each switch;
    and a torus's axes.

    A block of places are neighbouring ranks, and the next ones begin `pitch` ranks on; 0 where places are ranks.
    """

    domain: Numbers
    levels: tuple[tuple[Numbers, float], ...] = ()
    torus: tuple[int, ...] = ()
    block: Numbers = 0
    pitch: Numbers = 0


def reach_of_ranks(domain: int, topology: Topology = _FLAT) -> Reach:
    """The reach of links where places are ranks, and `domain` neighbours share fast links."""
    return Reach(domain, topology.levels, topology.torus)


def reach_in_stage(plan: Degrees, domain: int, topology: Topology = _FLAT, mirrors: Numbers = 1) -> Reach:
    """The reach of links where places are those of the ranks of a stage."""
    if np.all(plan.block == plan.stage_ranks):
        return reach_of_ranks(domain, topology)
    levels = tuple((of_stage(plan, devices, mirrors), share) for devices, share in topology.levels)
    near = of_stage(plan, domain, mirrors)
    pitch = plan.block * plan.pp
    return Reach(near, levels, topology.torus, np.where(plan.block == plan.stage_ranks, pitch, plan.block), pitch)


def group_of(size: Numbers, stride: Numbers, reach: Reach) -> Group:
    """The group of the ranks at `size` places, `stride` apart."""

    def within(places: Numbers) -> Numbers:
        return np.maximum(1, np.minimum(size, places // stride))

    inside = within(reach.domain)
    upper = tuple((within(places), share) for places, share in reach.levels)
    return Group(size, inside, upper, *(_on_torus(inside, stride, reach) if reach.torus else ()))


def _on_torus(size: Numbers, stride: Numbers, reach: Reach) -> tuple[Numbers, Numbers]:
    """(share of a device's links that rings of `size` ranks use, how often an all-to-all passes one link).

    Along an axis that a group fills it has a ring, both ways; of a part of it a line, whose ends meet on the way back.
    Groups that lie between each other's ranks share its links. With rings on several axes each carries its part (Jouppi
    et al. 2023, arXiv 2304.01433, section 2). An all-to-all of n ranks passes each link n / 8 times what a rank sends
    on a ring and n / 4 times on a line (its bisection), of the longest axis.
    """
    links = 2 * len(reach.torus)
    lanes, hops, first = 0.0 * size, 0.0 * size, 1
    for length in reach.torus:
        end = first * length
        along: Numbers = 1  # ranks of a group on this axis
        span: Numbers = 1  # positions from the first of them to behind the last
        for count, apart in _dims(size, stride, reach):
            begin = np.clip(apart, first, end)
            here = np.maximum(1, np.minimum(apart * count, end) // begin)
            along, span = along * here, np.where(here > 1, here * (begin // first), span)
        is_ring = (span == length) & (length > 2)
        lanes = lanes + np.where(along > 1, np.where(is_ring, 2, 1) * along / span, 0.0)
        hops = np.maximum(hops, np.where(along > 1, span / np.where(is_ring, 8, 4), 0.0))
        first = end
    return np.maximum(lanes, 1) / links, hops * links


def _dims(size: Numbers, stride: Numbers, reach: Reach) -> list[tuple[Numbers, Numbers]]:
    """(number of ranks, how far apart) within a block, and of the blocks."""
    if np.ndim(reach.block) == 0 and reach.block == 0:
        return [(size, stride)]
    inner = np.clip(reach.block // stride, 1, size)
    return [(inner, stride), (-(-size // inner), np.maximum(1, stride // reach.block) * reach.pitch)]
