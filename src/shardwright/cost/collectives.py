"""Seconds of a collective, by algorithm, over the links that its group crosses.

A group of ranks lies in domains of fast links (NVLink within a node or a rack), joined by a network. `inside` of its
ranks share a domain. A ring through all of them leaves each domain once, and the group's ranks there share their
network ports for it; so the network carries a domain's part at `inside` ports' bandwidth.
"""

import math
from dataclasses import dataclass

from shardwright.cost.calibration import Rates


@dataclass(frozen=True)
class Group:
    """`size` ranks, of which `inside` lie in one domain."""

    size: int
    inside: int

    @property
    def domains(self) -> int:
        """Domains that it crosses."""
        return -(-self.size // self.inside)


def group_of(size: int, stride: int, domain: int) -> Group:
    """The group of `size` ranks, `stride` apart, where `domain` neighbours share fast links."""
    inside = max(1, min(size, domain // stride)) if stride < domain else 1
    return Group(size, inside)


def ring_s(rates: Rates, group: Group, size_bytes: float, rounds: int = 1) -> float:
    """All-gather or reduce-scatter of `size_bytes` in full by a ring; an all-reduce is two rounds.

    Thakur et al. 2005 (Optimization of collective communication operations in MPICH, section 3): (n - 1) / n of the
    tensor passes each rank. Latency is that of a tree over domains
    for an all-reduce and of a ring for the others, as NCCL's.
    """
    n = group.size
    if n == 1:
        return 0.0
    moved = rounds * size_bytes * (n - 1) / n
    seconds = moved / rates.link if group.inside > 1 else 0.0
    latency = rates.link_latency_s * (1 + math.log2(group.inside))
    if group.domains > 1:
        seconds = max(seconds, moved / (rates.network * group.inside))
        hops = 2 * math.log2(group.domains) if rounds == 2 else group.domains - 1
        latency += rates.network_latency_s * hops / rounds
    return seconds + rounds * latency


def copies_sent(topk: int, domains: int) -> float:
    """How many of a token's `topk` copies cross the network where a domain with several of its experts gets one.

    Experts chosen evenly: domains x (1 - (1 - 1 / domains)^topk) are met, all of them at most.
    """
    return domains * (1 - (1 - 1 / domains) ** topk) / topk


def all_to_all_s(rates: Rates, group: Group, size_bytes: float, copies: float = 1.0) -> float:
    """Each rank sends an n-th of its `size_bytes` to every other, directly; `copies` of it to other domains."""
    n = group.size
    if n == 1:
        return 0.0
    near = size_bytes * (group.inside - 1) / n / rates.link
    far = copies * size_bytes * (n - group.inside) / n / rates.network
    latency = rates.link_latency_s + (rates.network_latency_s if group.domains > 1 else 0.0)
    return max(near, far) + latency


def message_s(rates: Rates, size_bytes: float, within_domain: bool) -> float:
    """One message between neighbours in the pipeline."""
    if within_domain:
        return size_bytes / rates.link + rates.link_latency_s
    return size_bytes / rates.network + rates.network_latency_s


def ring_pass_s(rates: Rates, group: Group, size_bytes: float) -> float:
    """What context parallelism passes round: (n - 1) / n of `size_bytes`, neighbour to neighbour."""
    n = group.size
    if n == 1:
        return 0.0
    moved = size_bytes * (n - 1) / n
    rate = rates.link if group.domains == 1 else rates.network
    return moved / rate + (n - 1) * rates.link_latency_s
