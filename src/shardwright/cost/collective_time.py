"""Seconds of a collective, by algorithm, over the links that its group crosses (cost/topology.py).

A ring through a group's domains of fast links leaves each domain once, and the group's ranks there share their network
ports for it; so the network carries a domain's part at the bandwidth of as many ports, and what passes inside a domain
does so meanwhile. That is what libraries' hierarchical algorithms come to.
"""

import numpy as np

from shardwright.cost.calibration import Rates
from shardwright.cost.topology import Group
from shardwright.workload.arrays import Numbers
from shardwright.workload.operators import Exchange


def ring_s(
    rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers = 1, scatters: bool = False
) -> Numbers:  # fmt: skip
    """All-gather of `size_bytes` in full in one round, or reduce-scatter if it `scatters`; an all-reduce is two.

    Thakur et al. 2005 (Optimization of collective communication operations in MPICH, section 3): (n - 1) / n of the
    tensor passes each rank. One round is a ring, with a step for each domain. Two rounds are two binary trees, each for
    half of the tensor (Sanders et al. 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan): the
    bandwidth of a ring, and a logarithm of its steps, so that neither small nor large tensors are faster by a ring.
    Nothing, or among one rank, takes no time.
    """
    if _knows(rates, "all_reduce"):
        one = _measured_s(rates, group, "reduce_scatter" if scatters else "all_gather", size_bytes)
        return np.where(rounds == 2, _measured_s(rates, group, "all_reduce", size_bytes), one)
    domains = group.domains
    moved = rounds * size_bytes * (group.size - 1) / group.size
    near = np.where(group.inside > 1, moved / (rates.link * group.lanes), 0.0)
    far = np.where(domains > 1, moved / (rates.network * group.ports), 0.0)
    steps = np.where(rounds == 2, np.log2(domains), domains - 1)
    latency = rounds * (rates.link_latency_s * (1 + np.log2(group.inside)) + rates.network_latency_s * steps)
    return np.where(moved > 0, np.maximum(near, far) + latency, 0.0)


def ring_of_s(rates: Rates, group: Group, exchange: Exchange) -> Numbers:
    """A collective of an operator that sums, gathers or scatters."""
    rounds = 2 if exchange.kind == "all_reduce" else 1
    return ring_s(rates, group, exchange.size, rounds, scatters=exchange.kind == "reduce_scatter")


def _knows(rates: Rates, kind: str) -> bool:
    return rates.measured is not None and rates.measured.knows(kind, "float32")


def _measured_s(rates: Rates, group: Group, kind: str, size_bytes: Numbers) -> Numbers:
    """The measured seconds of a collective, by its bytes; sums of 16 bits apart, if these were measured."""
    assert rates.measured is not None
    number = rates.number if rates.measured.knows(kind, rates.number) else "float32"
    seconds = rates.measured.collective_s(kind, number, group.size, size_bytes)
    return np.where(group.size > 1, seconds, 0.0)


def copies_sent(topk: int, domains: Numbers) -> Numbers:
    """How many of a token's `topk` copies cross the network where a domain with several of its experts gets one.

    Experts chosen evenly: domains x (1 - (1 - 1 / domains)^topk) are met, all of them at most.
    """
    return domains * (1 - (1 - 1 / domains) ** topk) / topk


def all_to_all_s(rates: Rates, group: Group, size_bytes: Numbers, copies: Numbers = 1.0) -> Numbers:
    """Each rank sends an n-th of its `size_bytes` to every other; `copies` of it to other domains.

    Where less than all crosses, what has come into a domain is spread there.
    """
    if _knows(rates, "all_to_all"):
        return _measured_s(rates, group, "all_to_all", size_bytes)
    n, inside = group.size, group.inside
    near = size_bytes * (inside - 1) / np.where(copies < 1, inside, n) / rates.link
    near = np.maximum(near, size_bytes * inside / n * group.hops / rates.link)
    far = size_bytes * group.upward(copies) / rates.network
    latency = rates.link_latency_s + np.where(group.domains > 1, rates.network_latency_s, 0.0)
    return np.where(near + far > 0, np.maximum(near, far) + latency, 0.0)


def message_s(rates: Rates, pipeline: Group, size_bytes: Numbers) -> Numbers:
    """One message between neighbours in the pipeline."""
    if _knows(rates, "message"):
        return _measured_s(rates, pipeline, "message", size_bytes)
    near = size_bytes / rates.link + rates.link_latency_s
    far = size_bytes * pipeline.stretch / rates.network + rates.network_latency_s
    return np.where(pipeline.domains == 1, near, far)


def message_latency_s(rates: Rates, pipeline: Group) -> float:
    """Seconds of a message of the pipeline in which it takes no room on its link; none where messages were measured."""
    if _knows(rates, "message"):
        return 0.0
    return rates.link_latency_s if bool(np.all(pipeline.domains == 1)) else rates.network_latency_s


def ring_pass_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """Seconds to pass keys and values round a ring of context parallelism: (n - 1) / n of `size_bytes`, neighbour to
    neighbour."""
    n = group.size
    if _knows(rates, "exchange"):
        return (n - 1) * _measured_s(rates, group, "exchange", size_bytes / n)
    moved = size_bytes * (n - 1) / n
    rate = np.where(group.domains == 1, rates.link * group.lanes, rates.network * group.narrowest)
    return np.where(moved > 0, moved / rate + (n - 1) * rates.link_latency_s, 0.0)
