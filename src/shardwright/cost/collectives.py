"""Seconds of a collective, by algorithm, over the links that its group crosses.

A group of ranks lies in domains of fast links (NVLink within a node or a rack), joined by a network. `inside` of its
ranks share a domain. A ring through all of them leaves each domain once, and the group's ranks there share their
network ports for it; so the network carries a domain's part at `inside` ports' bandwidth.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.cost.calibration import Rates
from shardwright.workload.arrays import Numbers


@dataclass(frozen=True)
class Group:
    """`size` ranks, of which `inside` lie in one domain. Both may be arrays."""

    size: Numbers
    inside: Numbers

    @property
    def domains(self) -> Numbers:
        """Domains that it crosses."""
        return -(-self.size // self.inside)


def group_of(size: Numbers, stride: Numbers, domain: int) -> Group:
    """The group of `size` ranks, `stride` apart, where `domain` neighbours share fast links."""
    return Group(size, np.maximum(1, np.minimum(size, domain // stride)))


def ring_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers = 1) -> Numbers:
    """All-gather or reduce-scatter of `size_bytes` in full by a ring; an all-reduce is two rounds.

    Thakur et al. 2005 (Optimization of collective communication operations in MPICH, section 3): (n - 1) / n of the
    tensor passes each rank. Latency is that of a tree over domains
    for an all-reduce and of a ring for the others, as NCCL's. Nothing, or among one rank, takes no time.
    """
    n, inside, domains = group.size, group.inside, group.domains
    moved = rounds * size_bytes * (n - 1) / n
    near = np.where(inside > 1, moved / rates.link, 0.0)
    far = np.where(domains > 1, moved / (rates.network * inside), 0.0)
    hops = np.where(rounds == 2, np.log2(domains), domains - 1)
    latency = rounds * rates.link_latency_s * (1 + np.log2(inside)) + rates.network_latency_s * hops * rounds
    return np.where(moved > 0, np.maximum(near, far) + latency, 0.0)


def copies_sent(topk: int, domains: Numbers) -> Numbers:
    """How many of a token's `topk` copies cross the network where a domain with several of its experts gets one.

    Experts chosen evenly: domains x (1 - (1 - 1 / domains)^topk) are met, all of them at most.
    """
    return domains * (1 - (1 - 1 / domains) ** topk) / topk


def all_to_all_s(rates: Rates, group: Group, size_bytes: Numbers, copies: Numbers = 1.0) -> Numbers:
    """Each rank sends an n-th of its `size_bytes` to every other; `copies` of it to other domains.

    Where less than all crosses, what has come into a domain is spread there.
    """
    n, inside = group.size, group.inside
    near = size_bytes * (inside - 1) / np.where(copies < 1, inside, n) / rates.link
    far = copies * size_bytes * (n - inside) / n / rates.network
    latency = rates.link_latency_s + np.where(group.domains > 1, rates.network_latency_s, 0.0)
    return np.where(near + far > 0, np.maximum(near, far) + latency, 0.0)


def message_s(rates: Rates, size_bytes: Numbers, is_within_domain: Numbers) -> Numbers:
    """One message between neighbours in the pipeline."""
    near = size_bytes / rates.link + rates.link_latency_s
    return np.where(is_within_domain, near, size_bytes / rates.network + rates.network_latency_s)


def ring_pass_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """What context parallelism passes round: (n - 1) / n of `size_bytes`, neighbour to neighbour."""
    n = group.size
    moved = size_bytes * (n - 1) / n
    rate = np.where(group.domains == 1, rates.link, rates.network)
    return np.where(moved > 0, moved / rate + (n - 1) * rates.link_latency_s, 0.0)
