"""One microbatch through one piece of the model (a layer of a kind, the embedding, the head), operator by operator.

Operators are those of layers/chains.py, and seconds those of cost/stage_time.py, as a prediction of the whole step
adds them up.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.software import SoftwareSpec
from shardwright.cost.group_links import Groups
from shardwright.cost.kernels import KernelTime
from shardwright.cost.stage_time import Costing, ExchangeTime, OperatorTime
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import RING_ROUNDS, SentBytes, all_to_all_sent, ring_sent
from shardwright.layers.chains import chains, share_run_again
from shardwright.layers.operators import Axis, Exchange, Kind, MatrixProduct
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import all_ranks
from shardwright.memory.layer_collectives import CollectiveCalls, OperatorCollectives, piece_collectives
from shardwright.memory.step_collectives import PieceKind, again_shares


@dataclass(frozen=True)
class Collective:
    """Calls of one collective of an operator in one pass, with our runtime: their bytes as a ledger counts them, the
    bytes that a rank sends for them, their seconds alone, and the seconds that the prediction leaves exposed. Seconds
    are None if the device is unknown. A collective predicted only for other software has no calls."""

    kind: str
    axis: str
    calls: int
    full_bytes: float
    sent: SentBytes
    seconds: float | None
    exposed_s: float | None


@dataclass(frozen=True)
class OperatorPass:
    """An operator's forward and backward. FLOPs, bytes and seconds belong to the pass that computes them: an operator
    whose forward runs in the backward has none in the forward, and `late_s` are its forward's seconds there. `repeated`
    is the share of the forward that a prediction recomputes, and `again_share` the share that our runtime recomputes.
    `pairs` are pairs of a query and a key, over the heads of a rank. Moved bytes are those of elementwise computations.
    `with_graph` are collectives of the only forward that keeps a graph."""

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
    """A piece: a layer of a kind, "embedding", "head" or "mtp"; with its recompute policy. Gaps are seconds between its
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
        return sum(operator.flops for operator in self.operators)

    @property
    def backward_flops(self) -> float:
        """FLOPs that the backward computes on one rank, with those of recomputation."""
        return sum(operator.backward_flops + operator.repeated * operator.flops for operator in self.operators)

    @property
    def forward_s(self) -> float | None:
        """Seconds of the forward's kernels."""
        return total_s([*(operator.forward_s for operator in self.operators), self.forward_gap_s])

    @property
    def again_s(self) -> float | None:
        """Seconds of the recomputation."""
        operators_s = [
            None if operator.forward_s is None else operator.repeated * operator.forward_s
            for operator in self.operators
        ]
        return total_s([*operators_s, self.again_gap_s])

    @property
    def backward_s(self) -> float | None:
        """Seconds of the backward's kernels, without the recomputation."""
        operators_s = [
            seconds
            for operator in self.operators
            for seconds in (operator.late_s, operator.input_grad_s, operator.weight_grad_s)
        ]
        return total_s([*operators_s, self.backward_gap_s])


def total_s(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if an addend is None."""
    total = 0.0
    for addend in seconds:
        if addend is None:
            return None
        total += addend
    return total


def rank_pieces(run: Run) -> list[dict[PieceKind, int]]:
    """The number of pieces of each kind that each pipeline rank computes, in all its stages."""
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
    """The passes of pieces of these kinds; without `costing` they have no seconds."""
    passes = _Passes(job, run, software, costing, Groups(run))
    return [passes.piece(*kind) for kind in kinds]


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
            self._operator(time, account, shares[account.name]) for time, account in zip(timed, accounts, strict=True)
        )
        if gaps is None:
            return PiecePass(kind, policy, operators, forward_gap_s=None, backward_gap_s=None, again_gap_s=None)
        return PiecePass(
            kind,
            policy,
            operators,
            forward_gap_s=float(gaps.forward),
            backward_gap_s=float(gaps.input_grad),
            again_gap_s=float(gaps.again),
        )

    def _operator(self, time: OperatorTime, account: OperatorCollectives, again_share: float) -> OperatorPass:
        o, t, is_timed = time.operator, time.computed, self.costing is not None
        forward_s, late_s = (0.0, t.forward) if o.in_backward else (t.forward, 0.0)
        late = 1.0 * o.in_backward
        pairs, scores = (float(o.scores.pairs), float(o.scores.flops)) if o.scores else (0.0, 0.0)
        frozen = float(sum(p.flops for p in o.products if p.is_frozen))  # whose weights have no gradient
        return OperatorPass(
            name=o.name,
            products=o.products,
            pairs=pairs,
            flops=(1.0 - late) * float(o.flops),
            backward_flops=late * float(o.flops) + 2.0 * float(o.flops - scores) - frozen + 2.5 * scores,
            moved_bytes=(1.0 - late) * float(o.forward_bytes),
            backward_moved_bytes=late * float(o.forward_bytes) + float(o.backward_bytes),
            in_backward=o.in_backward,
            repeated=time.repeated,
            again_share=again_share,
            forward_s=float(forward_s) if is_timed else None,
            late_s=float(late_s) if is_timed else None,
            input_grad_s=float(t.input_grad) if is_timed else None,
            weight_grad_s=float(t.weight_grad) if is_timed else None,
            forward=self._collectives(account.forward, time.forward),
            with_graph=self._collectives(account.with_graph, ()),
            backward=self._collectives(account.backward, time.backward),
        )

    def _collectives(self, calls: Iterable[CollectiveCalls], times: Iterable[ExchangeTime]) -> tuple[Collective, ...]:
        """The collectives of one pass of an operator, each with the seconds of the exchange predicted for it: the one
        of its kind with the nearest size. Collectives of a few numbers, which predictions leave out, have their seconds
        alone, of which none are exposed."""
        calls = tuple(calls)
        alone_times = [self._by_itself_s(collective) for collective in calls]
        matched: dict[int, ExchangeTime] = {}
        unmatched = []
        for time in (time for time in times if float(time.exchange.size)):
            key = time.exchange.kind, time.exchange.axis
            places = [
                place
                for place, collective in enumerate(calls)
                if place not in matched and (_PRICED_AS.get(collective.kind, collective.kind), collective.axis) == key
            ]
            if not places:  # predicted only for other software
                unmatched.append(time)
                continue
            matched[min(places, key=lambda place: self._unlike(calls[place], time.exchange, alone_times[place]))] = time
        rows = []
        for place, (collective, alone_s) in enumerate(zip(calls, alone_times, strict=True)):
            seconds, exposed = alone_s, None if self.costing is None else 0.0
            if place in matched:
                seconds, exposed = float(matched[place].seconds), float(matched[place].exposed)
            rows.append(
                Collective(
                    kind=collective.kind,
                    axis=collective.axis,
                    calls=collective.calls,
                    full_bytes=collective.num_bytes,
                    sent=self._sent(collective),
                    seconds=seconds,
                    exposed_s=exposed,
                )
            )
        for time in unmatched:
            kind, axis = time.exchange.kind, time.exchange.axis
            rows.append(
                Collective(
                    kind=kind,
                    axis=axis,
                    calls=0,
                    full_bytes=0.0,
                    sent=SentBytes(),
                    seconds=float(time.seconds),
                    exposed_s=float(time.exposed),
                )
            )
        return tuple(rows)

    @staticmethod
    def _unlike(collective: CollectiveCalls, exchange: Exchange, alone_s: float | None) -> tuple[float, float]:
        """The distance of a collective from an exchange: the ratio of their bytes, in either direction; and of two at
        the same distance the slower one first, because an exchange has the seconds of its slowest link."""
        ratio = max(1.0, float(collective.num_bytes)) / float(exchange.size)
        return abs(math.log(ratio)), -(alone_s or 0.0)

    def _by_itself_s(self, collective: CollectiveCalls) -> float | None:
        if self.costing is None:
            return None
        rates = self.costing.rates
        if collective.reach == "inside nodes":
            return collective.num_bytes / rates.link_bytes_per_s + collective.calls * rates.link_latency_s
        if collective.reach == "between nodes":
            latency_s = rates.link_latency_s + rates.network_latency_s
            return self._sent(collective).between / rates.network_bytes_per_s + collective.calls * latency_s
        kind: Kind = _PRICED_AS.get(collective.kind, collective.kind)  # type: ignore[assignment]
        axis: Axis = collective.axis  # type: ignore[assignment]
        exchange = Exchange(kind, axis, collective.num_bytes / collective.calls)
        return collective.calls * float(self.costing.exchange_s(exchange))

    def _sent(self, collective: CollectiveCalls) -> SentBytes:
        group: Group = getattr(self.groups, collective.axis)
        if collective.reach != "any":
            size = float(collective.num_bytes)
            if collective.reach == "inside nodes":
                return SentBytes(size, 0.0)
            # The ledger has room for each token on as many nodes as it may go to; some go to fewer.
            if self.costing is not None and collective.kind == "all_to_all_v":
                size *= float(self.costing.crossing_share())
            return SentBytes(0.0, size)
        # The ledger counts the bytes for other ranks: all but a rank's own share of a tensor.
        full_bytes = collective.num_bytes * float(group.size) / max(1.0, float(group.size) - 1)
        match collective.kind:
            case "all_to_all_v":
                return all_to_all_sent(group, full_bytes)
            case "all_to_all":
                return all_to_all_sent(group, collective.num_bytes)
            case "exchange":
                return ring_sent(group, full_bytes)
        return ring_sent(group, collective.num_bytes, RING_ROUNDS[collective.kind])


# The kinds that price a collective of the ledger: keys go around a ring as messages, and rows to experts count as even.
_PRICED_AS = {"exchange": "ring", "all_to_all_v": "all_to_all"}
