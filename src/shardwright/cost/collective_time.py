"""Seconds of a collective, by algorithm, over the links that its group crosses (cost/topology.py).

A ring through a group's domains of fast links leaves each domain once, and the group's ranks there share their network
ports for it; so the network carries a domain's part at the bandwidth of as many ports, and what passes inside a domain
does so meanwhile. That is what libraries' hierarchical algorithms come to.
"""

import numpy as np

from shardwright.cost.calibration import Rates
from shardwright.cost.topology import Group
from shardwright.workload.arrays import Numbers


def ring_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers = 1) -> Numbers:
    """All-gather or reduce-scatter of `size_bytes` in full, in one round; an all-reduce is two.

    Thakur et al. 2005 (Optimization of collective communication operations in MPICH, section 3): (n - 1) / n of the
    tensor passes each rank. One round is a ring, with a step for each domain. Two rounds are two binary trees, each for
    half of the tensor (Sanders et al. 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan): the
    bandwidth of a ring, and a logarithm of its steps, so that neither small nor large tensors are faster by a ring.
    Nothing, or among one rank, takes no time.
    """
    domains = group.domains
    moved = rounds * size_bytes * (group.size - 1) / group.size
    near = np.where(group.inside > 1, moved / (rates.link * group.lanes), 0.0)
    far = np.where(domains > 1, moved / (rates.network * group.ports), 0.0)
    steps = np.where(rounds == 2, np.log2(domains), domains - 1)
    latency = rounds * (rates.link_latency_s * (1 + np.log2(group.inside)) + rates.network_latency_s * steps)
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
    near = np.maximum(near, size_bytes * inside / n * group.hops / rates.link)
    far = size_bytes * group.upward(copies) / rates.network
    latency = rates.link_latency_s + np.where(group.domains > 1, rates.network_latency_s, 0.0)
    return np.where(near + far > 0, np.maximum(near, far) + latency, 0.0)


def message_s(rates: Rates, pipeline: Group, size_bytes: Numbers) -> Numbers:
    """One message between neighbours in the pipeline."""
    near = size_bytes / rates.link + rates.link_latency_s
    far = size_bytes * pipeline.stretch / rates.network + rates.network_latency_s
    return np.where(pipeline.domains == 1, near, far)


def ring_pass_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """What context parallelism passes round: (n - 1) / n of `size_bytes`, neighbour to neighbour."""
    n = group.size
    moved = size_bytes * (n - 1) / n
    rate = np.where(group.domains == 1, rates.link * group.lanes, rates.network * group.narrowest)
    return np.where(moved > 0, moved / rate + (n - 1) * rates.link_latency_s, 0.0)
