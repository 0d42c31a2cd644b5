"""Seconds of one collective by each algorithm, over the links that its group crosses.

Rings, NCCL's trees, sums in switches and direct exchanges take the seconds of collective_time.py, of which predictions
take the fastest. Any other algorithm is priced step by step, alpha + n / beta: a step takes the latency of its slowest
message, and the bytes of its busiest rank, over its links and over its own network port.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.config.cluster import ClusterSpec
from shardwright.config.phrase import say
from shardwright.cost.calibration import Rates, rates_of, shipped
from shardwright.cost.collective_time import (
    all_to_all_s,
    nccl_aggregated_trees_s,
    nccl_ring_s,
    nccl_trees_s,
    ring_s,
    sums_in_switches,
)
from shardwright.cost.topology import Group, group_of, reach_of_ranks
from shardwright.cost.wire_bytes import RING_ROUNDS, all_to_all_sent, ring_sent
from shardwright.layers.query import Run
from shardwright.sharding.collective_steps import (
    CollectiveKind,
    Holding,
    Step,
    algorithms,
    busiest_sender,
    play,
    steps_of,
)

TWO_TREES, AGGREGATED_TREES = "two trees", "aggregated trees"
SWITCH, SWITCH_AND_TREES = "switch", "switch, trees"  # NCCL's NVLS, and trees over domains that sum in theirs
MOST_PLAYED = 256  # ranks of a group whose steps are listed; a larger one has the algorithms of predictions alone
ON_RINGS = ("all-gather", "reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class PricedAlgorithm:
    """One algorithm of a collective: its steps, the bytes that the busiest rank sends inside its node (`inside_bytes`)
    and that the busiest node sends out (`out_bytes`), and seconds. `num_steps` is 0 if its steps are not listed.

    `is_predicted` if predictions of a step take these seconds: the fastest of those that NCCL has.
    """

    name: str
    num_steps: int
    inside_bytes: float
    out_bytes: float
    seconds: float
    is_predicted: bool = False


@dataclass(frozen=True)
class PricedCollective:
    """A collective of a tensor of `num_bytes` over a group of neighbouring ranks of a cluster, with the `rows` of its
    algorithms and the `steps` of one of them, `drawn`; "" if none is listed."""

    kind: CollectiveKind
    num_bytes: int
    cluster: ClusterSpec
    rates: Rates
    group: Group
    rows: Sequence[PricedAlgorithm]
    drawn: str
    steps: Sequence[Step]

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return int(self.group.size)

    def held(self, num_steps: int) -> Holding:
        """The pieces that each rank holds after so many steps."""
        return play(self.kind, self.num_ranks, self.steps[:num_steps])


def priced_collective(
    run: Run, cluster: ClusterSpec, kind: CollectiveKind, num_bytes: int, drawn: str = ""
) -> PricedCollective:
    """The collective over all ranks of a run. KeyError, with those that there are, if `drawn` is no algorithm whose
    steps can be listed; without it the first one is drawn."""
    rates = rates_of(run, shipped())
    group = group_of(int(run.grid.world), 1, reach_of_ranks(run.devices_per_node, run.topology))
    group = replace(group, size=int(group.size), inside=int(group.inside))
    rows = priced_algorithms(rates, group, kind, num_bytes)
    listed = [row.name for row in rows if row.num_steps] if group.size <= MOST_PLAYED else []
    if drawn and drawn not in listed:
        names = tuple(listed) or say("none for {ranks:,} ranks", ranks=group.size)
        raise KeyError(say("--algorithm {name} has no steps to draw; there are: {names}", name=drawn, names=names))
    drawn = drawn or next(iter(listed), "")
    steps = steps_of(kind, drawn, int(group.size), int(group.inside)) if drawn else []
    return PricedCollective(kind, num_bytes, cluster, rates, group, rows, drawn, steps)


def priced_algorithms(rates: Rates, group: Group, kind: CollectiveKind, num_bytes: int) -> list[PricedAlgorithm]:
    """Each algorithm of a collective of a tensor of `num_bytes`. The group's numbers are scalars."""
    num_ranks, inside = int(group.size), int(group.inside)
    if num_ranks == 1:
        return []
    if num_ranks > MOST_PLAYED:
        rows = _of_large_group(rates, group, kind, num_bytes)
    else:
        names = algorithms(kind, num_ranks, inside)
        rows = [_played(rates, group, kind, name, num_bytes) for name in names]
    if kind == "all-reduce":
        rows.append(_trees(rates, group, num_bytes))
    elif kind in ON_RINGS:
        rows += _aggregated_trees(rates, group, num_bytes)
    predicted_s = _predicted_s(rates, group, kind, num_bytes)
    nearest = min(rows, key=lambda row: abs(row.seconds - predicted_s), default=None) if predicted_s else None
    return [
        replace(row, is_predicted=row is nearest and math.isclose(row.seconds, predicted_s, rel_tol=1e-9))
        for row in rows
    ]


def _predicted_s(rates: Rates, group: Group, kind: CollectiveKind, num_bytes: int) -> float:
    """The seconds that predictions take; 0 for collectives that no step has."""
    if kind == "all-to-all":
        return float(all_to_all_s(rates, group, num_bytes))
    if kind not in ON_RINGS:
        return 0.0
    return float(ring_s(rates, group, num_bytes, _rounds(kind), scatters=kind == "reduce-scatter"))


def _rounds(kind: CollectiveKind) -> int:
    return RING_ROUNDS[kind.replace("-", "_")]


def _played(rates: Rates, group: Group, kind: CollectiveKind, name: str, num_bytes: int) -> PricedAlgorithm:
    steps = steps_of(kind, name, int(group.size), int(group.inside))
    load, piece_bytes = busiest_sender(steps, int(group.inside)), num_bytes / group.size
    if name == "ring" and kind in ON_RINGS:
        seconds = float(nccl_ring_s(rates, group, num_bytes, _rounds(kind)))
    elif name == "ring":  # pieces follow each other from or to the root, and each rank sends all of them
        seconds = float(nccl_ring_s(rates, group, num_bytes * group.size / (group.size - 1), 1))
    elif name == "direct" and kind in (*ON_RINGS, "all-to-all"):
        seconds = (2 if kind == "all-reduce" else 1) * float(all_to_all_s(rates, group, num_bytes))
    else:
        seconds = stepwise_s(rates, group, steps, float(piece_bytes))
    return PricedAlgorithm(name, len(steps), load.inside * piece_bytes, load.out_of_node * piece_bytes, seconds)


def stepwise_s(rates: Rates, group: Group, steps: Sequence[Step], piece_bytes: float) -> float:
    """Seconds of steps that wait for each other: alpha + n / beta each."""
    return rates.collective_s + sum(_step_s(rates, group, step, piece_bytes) for step in steps)


def _step_s(rates: Rates, group: Group, step: Step, piece_bytes: float) -> float:
    load = busiest_sender([step], int(group.inside))
    latency_s = rates.network_latency_s if load.out_of_rank else rates.link_latency_s
    network_s = load.out_of_rank * piece_bytes / (rates.network_bytes_per_s * float(group.narrowest))
    link_s = load.inside * piece_bytes / (rates.link_bytes_per_s * float(group.lanes))
    return latency_s + max(link_s, network_s)


def _of_large_group(rates: Rates, group: Group, kind: CollectiveKind, num_bytes: int) -> list[PricedAlgorithm]:
    num_ranks, domains = int(group.size), float(group.domains)
    if kind == "all-to-all":
        sent = all_to_all_sent(group, num_bytes)
        seconds = float(all_to_all_s(rates, group, num_bytes))
        return [PricedAlgorithm("direct", 1, sent.inside, sent.between * num_ranks / domains, seconds)]
    if kind not in ON_RINGS:
        return []
    rounds, sent = _rounds(kind), ring_sent(group, num_bytes, _rounds(kind))
    seconds = float(nccl_ring_s(rates, group, num_bytes, rounds))
    busiest_bytes = sent.total if group.inside > 1 else 0.0
    return [PricedAlgorithm("ring", rounds * (num_ranks - 1), busiest_bytes, sent.total, seconds)]


def _trees(rates: Rates, group: Group, num_bytes: int) -> PricedAlgorithm:
    """NCCL's double binary tree over the domains: half of the tensor goes up and down each. Inside a domain its ranks
    are a chain, or send all to a switch that sums."""
    inside, domains = float(group.inside), float(group.domains)
    out_bytes = 0.0 if domains == 1 else num_bytes * (1.0 if domains == 2 else 2.0)
    seconds = float(nccl_trees_s(rates, group, num_bytes))
    if sums_in_switches(rates, group):
        return PricedAlgorithm(SWITCH if domains == 1 else SWITCH_AND_TREES, 0, float(num_bytes), out_bytes, seconds)
    return PricedAlgorithm(TWO_TREES, 0, 2 * num_bytes * (inside - 1) / inside, out_bytes, seconds)


def _aggregated_trees(rates: Rates, group: Group, num_bytes: int) -> list[PricedAlgorithm]:
    """NCCL's parallel aggregated trees, where it has them. As in a ring each rank sends all pieces but one."""
    seconds = float(nccl_aggregated_trees_s(rates, group, num_bytes))
    if math.isinf(seconds):
        return []
    return [PricedAlgorithm(AGGREGATED_TREES, 0, 0.0, ring_sent(group, num_bytes, 1).total, seconds)]
