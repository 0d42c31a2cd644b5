"""Seconds of a collective, by algorithm, over the links that its group crosses (cost/topology.py).

A ring through a group's domains of fast links leaves each domain once, and the group's ranks there share their network
ports for it. So the network carries a domain's part at the bandwidth of all these ports, at the same time as the
traffic inside the domains. Hierarchical algorithms of libraries take the same time.
"""

import numpy as np

from shardwright.cost.calibration import Rates
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import RING_ROUNDS
from shardwright.layers.arrays import Numbers
from shardwright.layers.operators import Exchange


def ring_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers = 1, scatters: bool = False) -> Numbers:
    """Seconds of a collective of a tensor of `size_bytes` in full. One round is an all-gather, or a reduce-scatter if
    `scatters`; two rounds are an all-reduce.

    Thakur et al. 2005 (Optimization of collective communication operations in MPICH, section 3): (n - 1) / n of the
    tensor passes each rank. One round is a ring, with a step for each domain. Two rounds are two binary trees, each for
    half of the tensor (Sanders et al. 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan): they
    have the bandwidth of a ring and a logarithm of its steps, so a ring is never faster. An empty tensor, or a group of
    one rank, takes no time.
    """
    if _has_measurements(rates, "all_reduce"):
        round_s = _measured_s(rates, group, "reduce_scatter" if scatters else "all_gather", size_bytes)
        return np.where(rounds == 2, _measured_s(rates, group, "all_reduce", size_bytes), round_s)
    domains = group.domains
    sent_bytes = rounds * size_bytes * (group.size - 1) / group.size
    link_s = np.where(group.inside > 1, sent_bytes / (rates.link * group.lanes), 0.0)
    network_s = np.where(domains > 1, sent_bytes / (rates.network * group.ports), 0.0)
    steps = np.where(rounds == 2, np.log2(domains), domains - 1)
    latency = rounds * (rates.link_latency_s * (1 + np.log2(group.inside)) + rates.network_latency_s * steps)
    return np.where(sent_bytes > 0, np.maximum(link_s, network_s) + latency, 0.0)


def exchange_s(rates: Rates, group: Group, exchange: Exchange) -> Numbers:
    """Seconds of a collective of an operator that sums, gathers or scatters."""
    return ring_s(rates, group, exchange.size, RING_ROUNDS[exchange.kind], scatters=exchange.kind == "reduce_scatter")


def _has_measurements(rates: Rates, kind: str) -> bool:
    return rates.measured is not None and rates.measured.knows(kind, "float32")


def _measured_s(rates: Rates, group: Group, kind: str, size_bytes: Numbers) -> Numbers:
    """The measured seconds of a collective, by its bytes; with 16-bit numbers if these were measured."""
    assert rates.measured is not None
    number = rates.number if rates.measured.knows(kind, rates.number) else "float32"
    seconds = rates.measured.collective_s(kind, number, group.size, size_bytes)
    return np.where(group.size > 1, seconds, 0.0)


def copies_sent(topk: int, domains: Numbers) -> Numbers:
    """The share of a token's `topk` copies that cross the network if a domain with several of its experts gets one
    copy.

    With evenly chosen experts a token goes to domains x (1 - (1 - 1 / domains)^topk) domains.
    """
    return domains * (1 - (1 - 1 / domains) ** topk) / topk


def all_to_all_s(rates: Rates, group: Group, size_bytes: Numbers, crossing_share: Numbers = 1.0) -> Numbers:
    """Seconds of an all-to-all: each rank sends 1 / n of its `size_bytes` to every other rank.

    `crossing_share` is the share of the data for other domains that crosses the network. If it is below 1, each domain
    receives one copy of a token and sends it on to its ranks over the fast links.
    """
    if _has_measurements(rates, "all_to_all"):
        return _measured_s(rates, group, "all_to_all", size_bytes)
    n, inside = group.size, group.inside
    link_s = size_bytes * (inside - 1) / np.where(crossing_share < 1, inside, n) / rates.link
    link_s = np.maximum(link_s, size_bytes * inside / n * group.all_to_all_link_load / rates.link)
    network_s = size_bytes * group.network_share(crossing_share) / rates.network
    latency = rates.link_latency_s + np.where(group.domains > 1, rates.network_latency_s, 0.0)
    return np.where(link_s + network_s > 0, np.maximum(link_s, network_s) + latency, 0.0)


def message_s(rates: Rates, pipeline: Group, size_bytes: Numbers) -> Numbers:
    """Seconds of one message between neighbours in the pipeline."""
    if _has_measurements(rates, "message"):
        return _measured_s(rates, pipeline, "message", size_bytes)
    link_s = size_bytes / rates.link + rates.link_latency_s
    network_s = size_bytes * pipeline.oversubscription_slowdown / rates.network + rates.network_latency_s
    return np.where(pipeline.domains == 1, link_s, network_s)


def message_latency_s(rates: Rates, pipeline: Group) -> float:
    """The latency of a pipeline message: the part of its time that does not use bandwidth. It is 0 if messages
    were measured."""
    if _has_measurements(rates, "message"):
        return 0.0
    return rates.link_latency_s if bool(np.all(pipeline.domains == 1)) else rates.network_latency_s


def ring_pass_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """Seconds to pass keys and values along a ring of context parallelism: (n - 1) / n of `size_bytes`, from neighbour
    to neighbour."""
    n = group.size
    if _has_measurements(rates, "exchange"):
        return (n - 1) * _measured_s(rates, group, "exchange", size_bytes / n)
    sent_bytes = size_bytes * (n - 1) / n
    rate = np.where(group.domains == 1, rates.link * group.lanes, rates.network * group.narrowest)
    return np.where(sent_bytes > 0, sent_bytes / rate + (n - 1) * rates.link_latency_s, 0.0)
