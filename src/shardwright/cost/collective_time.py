"""Seconds of a collective, by algorithm, over the links that its group crosses (cost/topology.py).

An algorithm takes latency, by its steps, and time for its bytes, by the links. NCCL models its own algorithms so to
choose between them (github.com/NVIDIA/nccl, src/graph/tuning.cc); predictions take the fastest, too. A ring through a
group's domains of fast links leaves each domain once, and the group's ranks there share their network ports for it. So
the network carries a domain's part at the bandwidth of all these ports, at the same time as the traffic inside.

The rates are those of public measurements of collectives by themselves (benchmarks/collectives.py).
"""

import numpy as np

from shardwright.cost.calibration import Rates
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import RING_ROUNDS
from shardwright.layers.arrays import Numbers
from shardwright.layers.operators import Exchange

# NCCL's protocol for small messages (LL) stores a flag with each number, so that receivers need not wait for a fence:
# a step inside a domain takes less, and its bytes at least four times as long (src/graph/tuning.cc: hwLat, llMaxBws).
_SMALL_STEP, _SMALL_BYTES = 0.6 / 3.4, 4.0
# Trees, against rings: share of the bandwidth, between domains (between two, each has the other as its only neighbour)
# and in the chains inside them; and latency of a step, for large and for small messages.
_TREE_NETWORK, _PAIR_NETWORK, _TREE_LINK = 0.76, 0.95, 0.77
_TREE_STEP, _SMALL_TREE_STEP = 2.0, 0.5
# NCCL's parallel aggregated trees, against rings (src/graph/tuning.cc): share of the bandwidth between domains, latency
# of a step, and seconds for each rank.
_AGGREGATED_NETWORK, _AGGREGATED_STEP, _AGGREGATED_RANK_S = 0.75, 1 / 3.5, 2.8e-6
_LEAST_SWITCHED = 5  # ranks in a domain from which NCCL lets its switches sum
_SWITCHED_S = 2.4e-5  # that the way through the switch takes, there and back
# Trees over such domains, NCCL's NVLSTree: latency of a step (src/graph/tuning.cc, hwLatencies: 20.9 us where that of a
# ring is 14), and chunks that travel together, one for each rank of a domain, up to 32 (src/graph/search.cc), and for
# each channel (src/transport/nvls.cc: 16 on Hopper, half as many more on Blackwell), of a size that src/enqueue.cc
# chooses (calcCollChunking).
_SWITCHED_TREE_STEP = 20.9 / 14
_CHANNELS, _MOST_HEADS = 16, 32
_FEW_DOMAINS, _LARGE_CHUNK, _CHUNK, _SMALL_CHUNK = 4, 2**17, 2**16, 2**15


def ring_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers = 1, scatters: bool = False) -> Numbers:
    """Seconds of a collective of a tensor of `size_bytes` in full, by its fastest algorithm.

    One round is an all-gather, or a reduce-scatter if `scatters`, by a ring or by aggregated trees; two rounds are an
    all-reduce, by a ring or by two trees.

    An empty tensor, or a group of one rank, takes no time.
    """
    kind = "reduce_scatter" if scatters else "all_gather"
    round_s = _round_s(rates, group, size_bytes, kind)
    seconds = np.where(np.asarray(rounds) == 2, _all_reduce_s(rates, group, size_bytes), round_s)
    is_empty = (np.asarray(size_bytes) <= 0) | (np.asarray(group.size) <= 1)
    return np.where(is_empty, 0.0, seconds)


def _round_s(rates: Rates, group: Group, size_bytes: Numbers, kind: str) -> Numbers:
    if _has_measurements(rates, kind):
        return _measured_s(rates, group, kind, size_bytes)
    return np.minimum(nccl_ring_s(rates, group, size_bytes, 1), nccl_aggregated_trees_s(rates, group, size_bytes))


def _all_reduce_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    if _has_measurements(rates, "all_reduce"):
        return _measured_s(rates, group, "all_reduce", size_bytes)
    return np.minimum(nccl_ring_s(rates, group, size_bytes, 2), nccl_trees_s(rates, group, size_bytes))


def nccl_ring_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: Numbers) -> Numbers:
    """Seconds of so many rounds of a ring. (n - 1) / n of the tensor passes each rank in a round (Thakur et al. 2005,
    Optimization of collective communication operations in MPICH, section 3)."""
    domains = group.domains
    sent_bytes = rounds * size_bytes * (group.size - 1) / group.size
    link_s = np.where(group.inside > 1, sent_bytes / (rates.link_bytes_per_s * group.lanes), 0.0)
    network_s = np.where(domains > 1, sent_bytes / (rates.network_bytes_per_s * group.ports), 0.0)
    bytes_s = np.maximum(link_s, network_s)
    # A part of the tensor takes all hops of the ring but one, the cheapest.
    spared = np.where(domains > 1, 1, 0)
    inside_s = (domains * group.steps_inside - spared * (group.inside > 1)) * rates.link_latency_s
    between_s = np.where(domains > 1, domains - (group.inside <= 1), 0) * rates.network_latency_s
    plain_s = rounds * (inside_s + between_s) + bytes_s
    small_s = rounds * (_SMALL_STEP * inside_s + between_s) + _SMALL_BYTES * bytes_s
    return rates.collective_s + np.minimum(plain_s, small_s)


def nccl_trees_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """Seconds of an all-reduce by two binary trees of domains, each for half of the tensor (Sanders et al. 2009,
    Two-tree algorithms for full bandwidth broadcast, reduction and scan): a logarithm of a ring's steps. Between two
    domains each half goes one way and its sum the other, which is half of a ring's traffic.

    Inside a domain the ranks are a chain, or the switch sums (NCCL calls it NVLS).
    """
    domains, inside = group.domains, group.inside
    chain_bytes = 2 * size_bytes * (inside - 1) / inside
    chain_s = chain_bytes / (rates.link_bytes_per_s * group.lanes * np.where(domains > 1, _TREE_LINK, 1.0))
    chain_latency_s = 2 * group.steps_inside * rates.link_latency_s
    if rates.switch_reduce_bytes_per_s > 0:
        is_switched = sums_in_switches(rates, group)
        chain_s = np.where(is_switched, size_bytes / rates.switch_reduce_bytes_per_s, chain_s)
        chain_latency_s = np.where(is_switched, _SWITCHED_S, chain_latency_s)
    network_bytes = size_bytes * np.where(domains == 2, 1 / _PAIR_NETWORK, 2 / _TREE_NETWORK)
    network_s = np.where(domains > 1, network_bytes / (rates.network_bytes_per_s * group.ports), 0.0)
    bytes_s = np.maximum(chain_s, network_s)
    levels_s = 2 * np.log2(domains) * rates.network_latency_s
    plain_s = chain_latency_s + _TREE_STEP * levels_s + bytes_s
    small_s = chain_latency_s + _SMALL_TREE_STEP * levels_s + np.where(domains > 1, 2, 1) * _SMALL_BYTES * bytes_s
    trees_s = rates.collective_s + np.minimum(plain_s, small_s)
    return np.minimum(trees_s, nccl_switched_trees_s(rates, group, size_bytes))


def sums_in_switches(rates: Rates, group: Group) -> Numbers:
    """True where the switches of each domain sum what its ranks send them once."""
    return (group.inside >= _LEAST_SWITCHED) & (rates.switch_reduce_bytes_per_s > 0)


def nccl_switched_trees_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """Seconds of an all-reduce by trees between domains whose switches sum inside them, by NCCL's own code: all of the
    network's bandwidth, and at each level a latency and the time of the chunks that travel together.

    Infinite where there is one domain, where switches do not sum, or where NCCL takes no such trees over the network.
    """
    domains, inside = group.domains, group.inside
    if not (rates.switch_reduce_bytes_per_s > 0 and rates.switched_trees):
        return np.full_like(np.asarray(size_bytes * domains, dtype=float), np.inf)
    has_trees = sums_in_switches(rates, group) & (domains > 1)
    together = _CHANNELS * np.minimum(inside, _MOST_HEADS)
    chunk_bytes = np.where((domains < _FEW_DOMAINS) & (size_bytes >= 4 * together * _LARGE_CHUNK), _LARGE_CHUNK, _CHUNK)
    chunk_bytes = np.where(size_bytes < together * chunk_bytes, _SMALL_CHUNK, chunk_bytes)
    ports_rate = rates.network_bytes_per_s * group.ports
    chunks_s = np.minimum(size_bytes, together * chunk_bytes) / ports_rate
    levels_s = 2 * np.log2(domains) * (_SWITCHED_TREE_STEP * rates.network_latency_s + chunks_s)
    network_s = np.where(domains == 2, 1, 2) * size_bytes / ports_rate
    bytes_s = np.maximum(size_bytes / rates.switch_reduce_bytes_per_s, network_s)
    return np.where(has_trees, rates.collective_s + _SWITCHED_S + levels_s + bytes_s, np.inf)


def nccl_aggregated_trees_s(rates: Rates, group: Group, size_bytes: Numbers) -> Numbers:
    """Seconds of an all-gather or a reduce-scatter by parallel aggregated trees: a logarithm of steps, and a part that
    grows with the ranks (Jeaugey 2025, arXiv 2506.20252, and NCCL's own model, src/graph/tuning.cc).

    Infinite where NCCL has none: it takes them from 2.23 on, and only if each rank has a domain of its own.
    """
    is_alone = rates.aggregated_trees & (np.asarray(group.inside) == 1) & (np.asarray(group.size) > 1)
    steps_s = np.log2(np.maximum(group.size, 1)) * _AGGREGATED_STEP * rates.network_latency_s
    sent_bytes = size_bytes * (group.size - 1) / group.size
    bytes_s = sent_bytes / (_AGGREGATED_NETWORK * rates.network_bytes_per_s * group.ports)
    return np.where(is_alone, rates.collective_s + steps_s + _AGGREGATED_RANK_S * group.size + bytes_s, np.inf)


def exchange_s(rates: Rates, group: Group, exchange: Exchange) -> Numbers:
    """Seconds of a collective of an operator that sums, gathers or scatters."""
    return ring_s(rates, group, exchange.size, RING_ROUNDS[exchange.kind], scatters=exchange.kind == "reduce_scatter")


def _has_measurements(rates: Rates, kind: str) -> bool:
    measured = rates.measured
    return measured is not None and any(measured.knows(kind, number) for number in (rates.number, "float32"))


def _measured_s(rates: Rates, group: Group, kind: str, size_bytes: Numbers) -> Numbers:
    """The measured seconds of a collective, by its bytes; with 16-bit numbers if these were measured."""
    assert rates.measured is not None
    number = rates.number if rates.measured.knows(kind, rates.number) else "float32"
    seconds = rates.measured.collective_s(kind, number, group.size, size_bytes)
    return np.where(group.size > 1, seconds, 0.0)


def all_to_all_s(
    rates: Rates,
    group: Group,
    size_bytes: Numbers,
    crossing_share: Numbers = 1.0,
    link_share: Numbers = 1.0,
    is_pipelined: bool = True,
) -> Numbers:
    """Seconds of an all-to-all: each rank sends 1 / n of its `size_bytes` to every other rank.

    `crossing_share` is the share of the data for other domains that crosses the network. If it is below 1, each domain
    receives one copy of a token and sends it on to its ranks over the fast links, while it receives others if
    `is_pipelined`. `link_share` is the share of the data that takes the fast links.
    """
    if _has_measurements(rates, "all_to_all"):
        return _measured_s(rates, group, "all_to_all", size_bytes)
    n, inside, crosses = group.size, group.inside, group.domains > 1
    link_s = size_bytes * (inside - 1) / np.where(crossing_share < 1, inside, n) / rates.link_bytes_per_s
    link_s = link_share * np.maximum(
        link_s, size_bytes * inside / n * group.all_to_all_link_load / rates.link_bytes_per_s
    )
    network_s = size_bytes * group.network_share(crossing_share) / rates.network_bytes_per_s
    between_s = 2 * rates.network_latency_s + (n - inside) * rates.peer_s
    latency_s = rates.collective_s + rates.link_latency_s + np.where(crosses, between_s, 0.0)
    is_two_hops = (np.asarray(crossing_share) < 1) & (not is_pipelined)
    both_s = np.where(is_two_hops & (network_s > 0), link_s + network_s, np.maximum(link_s, network_s))
    return np.where(link_s + network_s > 0, both_s + latency_s, 0.0)


def message_s(rates: Rates, pipeline: Group, size_bytes: Numbers) -> Numbers:
    """Seconds of one message between neighbours in the pipeline."""
    if _has_measurements(rates, "message"):
        return _measured_s(rates, pipeline, "message", size_bytes)
    bytes_s = np.where(
        pipeline.domains == 1,
        size_bytes / rates.link_bytes_per_s,
        size_bytes * pipeline.oversubscription_slowdown / rates.network_bytes_per_s,
    )
    return bytes_s + message_latency_s(rates, pipeline)


def message_latency_s(rates: Rates, group: Group) -> Numbers:
    """The latency of a message between neighbours of a group: the part of its time that does not use bandwidth. It is 0
    if messages were measured."""
    if _has_measurements(rates, "message"):
        return 0.0
    return rates.collective_s / 2 + np.where(group.domains == 1, rates.link_latency_s, rates.network_latency_s)


def ring_pass_s(rates: Rates, group: Group, size_bytes: Numbers, rounds: int = 1) -> Numbers:
    """Seconds to pass keys and values along a ring of context parallelism: (n - 1) / n of `size_bytes`, from neighbour
    to neighbour, in `rounds` rounds one after the other."""
    n = group.size
    if _has_measurements(rates, "exchange"):
        return rounds * (n - 1) * _measured_s(rates, group, "exchange", size_bytes / (rounds * n))
    sent_bytes = size_bytes * (n - 1) / n
    rate = np.where(
        group.domains == 1, rates.link_bytes_per_s * group.lanes, rates.network_bytes_per_s * group.narrowest
    )
    latency_s = rounds * (n - 1) * message_latency_s(rates, group)
    return np.where(sent_bytes > 0, sent_bytes / rate + latency_s, 0.0)
