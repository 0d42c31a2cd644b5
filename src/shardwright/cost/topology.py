"""The links that a group of ranks crosses: fast links within a domain, switches above the nodes, the rings of a torus.

Ranks are laid out axis by axis, so a group is `size` ranks that lie `stride` apart: among all ranks, or among the ranks
of a stage. Between the blocks of a stage there may be other stages of the pipeline (config/rank_order.py).
"""

from dataclasses import dataclass

import numpy as np

from shardwright.config.rank_order import Degrees
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import Topology
from shardwright.sharding.groups import of_stage

_FLAT = Topology()


@dataclass(frozen=True)
class Group:
    """`size` ranks, of which `inside` lie in one domain of fast links. Numbers may be arrays.

    `upper` has, for each level of switches, (ranks of the group below one switch, share of the bandwidth that goes on
    upward). In a torus `lanes` is the share of a device's links that the rings of the group use, a device's links
    carry `all_to_all_link_load` times the data of one rank in an all-to-all, and `torus_steps` are the steps of the
    rings, one axis after the other.
    """

    size: Numbers
    inside: Numbers
    upper: tuple[tuple[Numbers, float], ...] = ()
    lanes: Numbers = 1.0
    all_to_all_link_load: Numbers = 0.0
    torus_steps: Numbers | None = None

    @property
    def domains(self) -> Numbers:
        """Number of domains of fast links that the group crosses."""
        return -(-self.size // self.inside)

    @property
    def steps_inside(self) -> Numbers:
        """Steps of a ring through the ranks of the group in one domain."""
        return self.inside - 1 if self.torus_steps is None else self.torus_steps

    @property
    def ports(self) -> Numbers:
        """Network ports of a ring through all its domains, at the narrowest level that it crosses.

        A ring leaves each switch once. The groups with ranks below one switch share its links upward, each in
        proportion to its ranks there.
        """
        return self._narrowed(self.inside)

    def _narrowed(self, ports: Numbers) -> Numbers:
        """`ports`, or fewer if a crossed level has fewer upward."""
        for below, share in self.upper:
            ports = np.where(below < self.size, np.minimum(ports, below * share), ports)
        return ports

    def network_share(self, crossing_share: Numbers = 1.0) -> Numbers:
        """The share of a rank's all-to-all that leaves the domain, divided by the available share of port bandwidth, at
        the narrowest level."""
        network_share = crossing_share * (self.size - self.inside) / self.size
        for below, share in self.upper:
            upward_share = crossing_share * np.maximum(0, self.size - below) / self.size
            network_share = np.maximum(network_share, upward_share / share)
        return network_share

    @property
    def oversubscription_slowdown(self) -> Numbers:
        """The mean time of a message between neighbours, divided by its time at full port bandwidth.

        One of the `below` ranks below a switch sends upward, with the bandwidth shares of all of them.
        """
        factor: Numbers = 1.0
        for below, share in self.upper:
            crossing = (-(-self.size // below) - 1) / np.maximum(1, self.size - 1)
            factor = np.maximum(factor, 1 + crossing * (1 / np.minimum(1, below * share) - 1))
        return factor

    @property
    def narrowest(self) -> Numbers:
        """Share of a port's bandwidth in the slowest step of a ring, for which the others wait."""
        return self._narrowed(1.0)


@dataclass(frozen=True)
class Reach:
    """The number of places in a `domain` of fast links, and below each switch with its share of bandwidth upward
    (`levels`); and the axes of a torus.

    The places of a `block` are neighbouring ranks; the next block begins `pitch` ranks later. Both are 0 if places are
    ranks.
    """

    domain: Numbers
    levels: tuple[tuple[Numbers, float], ...] = ()
    torus: tuple[int, ...] = ()
    block: Numbers = 0
    pitch: Numbers = 0


def reach_of_ranks(domain: int, topology: Topology = _FLAT) -> Reach:
    """The reach of links if places are ranks, and `domain` neighbours share fast links."""
    return Reach(domain, topology.levels, topology.torus)


def reach_in_stage(plan: Degrees, domain: int, topology: Topology = _FLAT, mirrors: Numbers = 1) -> Reach:
    """The reach of links if places count the ranks of a stage."""
    are_neighbours = (plan.block == plan.stage_ranks) & (mirrors == 1)
    if np.all(are_neighbours):
        return reach_of_ranks(domain, topology)
    levels = tuple((of_stage(plan, devices, mirrors), share) for devices, share in topology.levels)
    domain_in_stage = of_stage(plan, domain, mirrors)
    pitch = plan.block * plan.pp
    return Reach(domain_in_stage, levels, topology.torus, np.where(are_neighbours, pitch, plan.block), pitch)


def group_of(size: Numbers, stride: Numbers, reach: Reach) -> Group:
    """The group of the ranks at `size` places, `stride` apart."""

    def within(places: Numbers) -> Numbers:
        return np.maximum(1, np.minimum(size, places // stride))

    inside = within(reach.domain)
    upper = tuple((within(places), share) for places, share in reach.levels)
    return Group(size, inside, upper, *(_on_torus(inside, stride, reach) if reach.torus else ()))


def _on_torus(size: Numbers, stride: Numbers, reach: Reach) -> tuple[Numbers, Numbers, Numbers]:
    """(share of a device's links that rings of `size` ranks use, load of a device's links in an all-to-all,
    steps of the rings).

    A group that fills an axis has a ring along it, in both directions; a group on a part of the axis has a line, whose
    ends meet on the way back. Interleaved groups share the links. With rings on several axes each carries its part
    (Jouppi et al. 2023, arXiv 2304.01433, section 2). In an all-to-all of n ranks, each link of the longest axis
    carries n / 8 times the data of a rank on a ring and n / 4 times on a line (bisection).
    """
    links = 2 * len(reach.torus)
    lanes, link_load, steps, axis_stride = 0.0 * size, 0.0 * size, 0.0 * size, 1
    for length in reach.torus:
        next_stride = axis_stride * length
        ranks_on_axis: Numbers = 1  # of the group
        span: Numbers = 1  # positions from the first to one past the last of them
        for count, apart in _dims(size, stride, reach):
            begin = np.clip(apart, axis_stride, next_stride)
            count_on_axis = np.maximum(1, np.minimum(apart * count, next_stride) // begin)
            ranks_on_axis = ranks_on_axis * count_on_axis
            span = np.where(count_on_axis > 1, count_on_axis * (begin // axis_stride), span)
        is_ring = (span == length) & (length > 2)
        lanes = lanes + np.where(ranks_on_axis > 1, np.where(is_ring, 2, 1) * ranks_on_axis / span, 0.0)
        link_load = np.maximum(link_load, np.where(ranks_on_axis > 1, span / np.where(is_ring, 8, 4), 0.0))
        steps = steps + ranks_on_axis - 1
        axis_stride = next_stride
    return np.maximum(lanes, 1) / links, link_load * links, steps


def _dims(size: Numbers, stride: Numbers, reach: Reach) -> list[tuple[Numbers, Numbers]]:
    """(number of ranks, their stride) within a block, and (number, stride) of the blocks."""
    if np.ndim(reach.block) == 0 and reach.block == 0:
        return [(size, stride)]
    inner = np.clip(reach.block // stride, 1, size)
    return [(inner, stride), (-(-size // inner), np.maximum(1, stride // reach.block) * reach.pitch)]
