"""One microbatch through one piece of the model (a layer of a kind, the embedding, the head), operator by operator.

Operators are those of workload/layers.py and seconds those of cost/stage_time.py, as a prediction of the whole step
adds them up.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.account.layer_collectives import CollectiveCalls, OperatorCollectives, piece_collectives
from shardwright.account.step_collectives import PieceKind, again_shares
from shardwright.config.job import JobSpec
from shardwright.config.software import SoftwareSpec
from shardwright.cost.group_links import Groups
from shardwright.cost.kernels import KernelTime
from shardwright.cost.stage_time import Costing, ExchangeTime, OperatorTime
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import SentBytes, all_to_all_sent, ring_sent
from shardwright.workload.layers import chains, share_run_again
from shardwright.workload.operators import Axis, Exchange, Kind, MatrixProduct
from shardwright.workload.query import Run
from shardwright.workload.stage_contents import all_ranks


@dataclass(frozen=True)
class Collective:
    """Calls of one collective of an operator in one pass, those of our runtime: their bytes as a ledger counts them,
    what a rank sends for them, seconds by themselves and those that the prediction finds nothing to hide. Seconds are
    None where the device is not known. What is predicted of other software alone has no calls."""

    kind: str
    axis: str
    calls: int
    full_bytes: float
    sent: SentBytes
    seconds: float | None
    exposed_s: float | None


@dataclass(frozen=True)
class OperatorPass:
    """An operator's forward and backward. FLOPs, bytes and seconds are those of the pass that they are computed in:
    what is computed in the backward from the first on has none in the forward, and `late_s` are its forward's seconds
    there. `repeated` is the share of the forward that a prediction computes again and `again_share` that which our
    runtime does; `pairs` are those of a query and a key, over the heads of a rank. Moved bytes are those of what is
    computed element by element. `with_graph` are collectives of the one forward that keeps a graph."""

    name: str
    products: tuple[MatrixProduct, ...]
    pairs: float
    flops: float
    backward_flops: float
    moved_bytes: float
    backward_moved_bytes: float
    in_backward: bool
    repeated: float
    again_share: float
    forward_s: float | None
    late_s: float | None
    input_grad_s: float | None
    weight_grad_s: float | None
    forward: tuple[Collective, ...]
    with_graph: tuple[Collective, ...]
    backward: tuple[Collective, ...]


@dataclass(frozen=True)
class PiecePass:
    """A piece: a layer of a kind, "embedding", "head" or "mtp"; and what it recomputes. Gaps are seconds between its
    kernels."""

    kind: str
    policy: str
    operators: tuple[OperatorPass, ...]
    forward_gap_s: float | None
    backward_gap_s: float | None
    again_gap_s: float | None

    @property
    def flops(self) -> float:
        """FLOPs that the forward computes, on one rank."""
        return sum(of.flops for of in self.operators)

    @property
    def backward_flops(self) -> float:
        """FLOPs that the backward computes on one rank, with those of computing again."""
        return sum(of.backward_flops + of.repeated * of.flops for of in self.operators)

    @property
    def forward_s(self) -> float | None:
        """Seconds of the forward's kernels."""
        return total_s([*(of.forward_s for of in self.operators), self.forward_gap_s])

    @property
    def again_s(self) -> float | None:
        """Seconds of what is computed again."""
        again = [None if of.forward_s is None else of.repeated * of.forward_s for of in self.operators]
        return total_s([*again, self.again_gap_s])

    @property
    def backward_s(self) -> float | None:
        """Seconds of the backward's kernels, without what is computed again."""
        of_each = [seconds for of in self.operators for seconds in (of.late_s, of.input_grad_s, of.weight_grad_s)]
        return total_s([*of_each, self.backward_gap_s])


def total_s(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if one is not known."""
    total = 0.0
    for some in seconds:
        if some is None:
            return None
        total += some
    return total


def rank_pieces(run: Run) -> list[dict[PieceKind, int]]:
    """How many pieces of each kind each pipeline rank computes, through all its stages."""
    ranks = all_ranks(run.shape, run.grid.as_arrays())
    ends = {("embedding", "none"): ranks.embedding, ("head", "none"): ranks.head}
    if run.shape.mtp:
        ends |= {("mtp", "none"): ranks.head * run.shape.mtp}
    counts = dict(zip(ranks.kinds, ranks.layers, strict=True)) | ends
    return [
        {kind: int(count[rank, 0]) for kind, count in counts.items() if count[rank, 0]}
        for rank in range(int(run.grid.pp))
    ]


def piece_passes(
    job: JobSpec, run: Run, software: SoftwareSpec, costing: Costing | None, kinds: Iterable[PieceKind]
) -> list[PiecePass]:
    """The pieces of these kinds; without `costing` they have no seconds."""
    of = _Passes(job, run, software, costing, Groups(run))
    return [of.piece(*kind) for kind in kinds]


@dataclass(frozen=True)
class _Passes:
    job: JobSpec
    run: Run
    software: SoftwareSpec
    costing: Costing | None
    groups: Groups

    def piece(self, kind: str, policy: str) -> PiecePass:
        accounts = piece_collectives(self.job, kind)
        shares = again_shares(accounts, policy)
        if self.costing is None:
            timed = [
                OperatorTime(o, KernelTime(0.0, 0.0, 0.0), share_run_again(o, policy), (), ())
                for o in chains(self.run.shape, self.run.grid, self.software)[kind]
            ]
            gaps = None
        else:
            timed, gaps = list(self.costing.operators(kind, policy)), self.costing.gaps(kind, policy)
        operators = tuple(
            self._operator(of, account, shares[account.name]) for of, account in zip(timed, accounts, strict=True)
        )
        if gaps is None:
            return PiecePass(kind, policy, operators, None, None, None)
        return PiecePass(kind, policy, operators, float(gaps.forward), float(gaps.input_grad), float(gaps.again))

    def _operator(self, of: OperatorTime, account: OperatorCollectives, again_share: float) -> OperatorPass:
        o, t, is_timed = of.operator, of.computed, self.costing is not None
        forward_s, late_s = (0.0, t.forward) if o.in_backward else (t.forward, 0.0)
        late = 1.0 * o.in_backward
        pairs, scores = (float(o.scores.pairs), float(o.scores.flops)) if o.scores else (0.0, 0.0)
        return OperatorPass(
            name=o.name,
            products=o.products,
            pairs=pairs,
            flops=(1.0 - late) * float(o.flops),
            backward_flops=late * float(o.flops) + 2.0 * float(o.flops - scores) + 2.5 * scores,
            moved_bytes=(1.0 - late) * float(o.forward_bytes),
            backward_moved_bytes=late * float(o.forward_bytes) + float(o.backward_bytes),
            in_backward=o.in_backward,
            repeated=of.repeated,
            again_share=again_share,
            forward_s=float(forward_s) if is_timed else None,
            late_s=float(late_s) if is_timed else None,
            input_grad_s=float(t.input_grad) if is_timed else None,
            weight_grad_s=float(t.weight_grad) if is_timed else None,
            forward=self._collectives(account.forward, of.forward),
            with_graph=self._collectives(account.with_graph, ()),
            backward=self._collectives(account.backward, of.backward),
        )

    def _collectives(self, moved: Iterable[CollectiveCalls], times: Iterable[ExchangeTime]) -> tuple[Collective, ...]:
        """The collectives of one pass of an operator, each with the seconds of the exchange that is predicted for it,
        which is the one of its kind that is nearest in size; a few numbers that predictions leave out have those that
        they take by themselves, and hold nobody up."""
        moved = tuple(moved)
        alone = [self._by_itself_s(one) for one in moved]
        matched: dict[int, ExchangeTime] = {}
        unmatched = []
        for time in (time for time in times if float(time.exchange.size)):
            key = time.exchange.kind, time.exchange.axis
            places = [
                place
                for place, one in enumerate(moved)
                if place not in matched and (_PRICED_AS.get(one.kind, one.kind), one.axis) == key
            ]
            if not places:  # of other software alone
                unmatched.append(time)
                continue
            matched[min(places, key=lambda place: self._unlike(moved[place], time.exchange, alone[place]))] = time
        rows = []
        for place, (one, alone_s) in enumerate(zip(moved, alone, strict=True)):
            seconds, exposed = alone_s, None if self.costing is None else 0.0
            if place in matched:
                seconds, exposed = float(matched[place].seconds), float(matched[place].exposed)
            rows.append(Collective(one.kind, one.axis, one.calls, one.num_bytes, self._sent(one), seconds, exposed))
        for time in unmatched:
            kind, axis = time.exchange.kind, time.exchange.axis
            rows.append(Collective(kind, axis, 0, 0.0, SentBytes(), float(time.seconds), float(time.exposed)))
        return tuple(rows)

    @staticmethod
    def _unlike(one: CollectiveCalls, exchange: Exchange, alone_s: float | None) -> tuple[float, float]:
        """How far a collective is from an exchange: the ratio of their bytes, on either side, and, where two are as
        near, the one that takes less, for an exchange has the seconds of the link that holds it up."""
        ratio = max(1.0, float(one.num_bytes)) / float(exchange.size)
        return abs(math.log(ratio)), -(alone_s or 0.0)

    def _by_itself_s(self, of: CollectiveCalls) -> float | None:
        if self.costing is None:
            return None
        rates = self.costing.rates
        if of.reach == "inside nodes":
            return of.num_bytes / rates.link + of.calls * rates.link_latency_s
        if of.reach == "between nodes":
            return of.num_bytes / rates.network + of.calls * (rates.link_latency_s + rates.network_latency_s)
        kind: Kind = _PRICED_AS.get(of.kind, of.kind)  # type: ignore[assignment]
        axis: Axis = of.axis  # type: ignore[assignment]
        return of.calls * float(self.costing.exchange_s(Exchange(kind, axis, of.num_bytes / of.calls)))

    def _sent(self, of: CollectiveCalls) -> SentBytes:
        group: Group = getattr(self.groups, of.axis)
        if of.reach != "any":
            is_inside, size = of.reach == "inside nodes", float(of.num_bytes)
            return SentBytes(size, 0.0) if is_inside else SentBytes(0.0, size)
        # What is given to others is all but a rank's own share of a tensor.
        whole = of.num_bytes * float(group.size) / max(1.0, float(group.size) - 1)
        match of.kind:
            case "all_to_all_v":
                return all_to_all_sent(group, whole)
            case "all_to_all":
                return all_to_all_sent(group, of.num_bytes)
            case "exchange":
                return ring_sent(group, whole)
        return ring_sent(group, of.num_bytes, 2 if of.kind == "all_reduce" else 1)


# What prices a collective of the ledger: keys go around a ring as messages, and rows to experts are as even as others.
_PRICED_AS = {"exchange": "ring", "all_to_all_v": "all_to_all"}
