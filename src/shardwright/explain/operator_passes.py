"""One microbatch through one piece of the model (a layer of a kind, the embedding, the head), operator by operator.

Operators are those of workload/layers.py and seconds those of cost/stage_time.py, as a prediction of the whole step
adds them up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwright.account.kept_tensors import Share
from shardwright.account.moe_activations import expected_rows
from shardwright.config.job import JobSpec
from shardwright.config.software import SoftwareSpec
from shardwright.cost.collective_time import copies_sent
from shardwright.cost.group_links import Groups
from shardwright.cost.stage_time import Costing, ExchangeTime, OperatorTime
from shardwright.cost.topology import Group
from shardwright.cost.wire_bytes import SentBytes, all_to_all_sent, ring_sent
from shardwright.workload.layers import chains, share_run_again
from shardwright.workload.operators import Exchange, MatrixProduct, Operator
from shardwright.workload.query import Run
from shardwright.workload.stage_contents import all_ranks


@dataclass(frozen=True)
class Collective:
    """One collective of an operator: bytes of the full tensor, what a rank sends for it, seconds by itself and those
    that nothing hides. Seconds are None where the device is not known."""

    kind: str
    axis: str
    full_bytes: float
    sent: SentBytes
    seconds: float | None
    exposed_s: float | None


@dataclass(frozen=True)
class OperatorPass:
    """An operator's forward and backward. `flops` are of the forward; `repeated` is the share of it that is computed
    again; `pairs` are those of a query and a key, over the heads of a rank."""

    name: str
    products: tuple[MatrixProduct, ...]
    pairs: float
    flops: float
    backward_flops: float
    moved_bytes: float
    repeated: float
    forward_s: float | None
    input_grad_s: float | None
    weight_grad_s: float | None
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


@dataclass(frozen=True)
class PiecePass:
    """A piece: "dense" or "experts" (a layer), "embedding" or "head"; and what it recomputes. Gaps are seconds between
    its kernels."""

    kind: str
    policy: str
    operators: tuple[OperatorPass, ...]
    forward_gap_s: float | None
    backward_gap_s: float | None
    again_gap_s: float | None

    @property
    def flops(self) -> float:
        """FLOPs of the forward, on one rank."""
        return sum(of.flops for of in self.operators)

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
        of_each = [seconds for of in self.operators for seconds in (of.input_grad_s, of.weight_grad_s)]
        return total_s([*of_each, self.backward_gap_s])


def total_s(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if one is not known."""
    total = 0.0
    for some in seconds:
        if some is None:
            return None
        total += some
    return total


PieceKind = tuple[str, str]  # the kind of a piece, and what it recomputes


def rank_pieces(run: Run) -> list[dict[PieceKind, int]]:
    """How many pieces of each kind each pipeline rank computes, through all its stages."""
    ranks = all_ranks(run.shape, run.cut.as_arrays())
    ends = {("embedding", "none"): ranks.embedding, ("head", "none"): ranks.head}
    counts = dict(zip(ranks.kinds, ranks.layers, strict=True)) | ends
    return [
        {kind: int(count[rank, 0]) for kind, count in counts.items() if count[rank, 0]}
        for rank in range(int(run.cut.pp))
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
        if self.costing is None:
            of_kind = chains(self.run.shape, self.run.cut, self.software)[kind]
            return PiecePass(kind, policy, tuple(self._untimed(o, policy) for o in of_kind), None, None, None)
        gaps = self.costing.gaps(kind, policy)
        operators = tuple(self._timed(of) for of in self.costing.operators(kind, policy))
        return PiecePass(kind, policy, operators, float(gaps.forward), float(gaps.input_grad), float(gaps.again))

    def _timed(self, of: OperatorTime) -> OperatorPass:
        t = of.kernels
        return replace(
            self._plain(of.operator, of.repeated),
            forward_s=float(t.forward),
            input_grad_s=float(t.input_grad),
            weight_grad_s=float(t.weight_grad),
            forward=self._collectives(of.forward),
            backward=self._collectives(of.backward),
        )

    def _untimed(self, o: Operator, policy: str) -> OperatorPass:
        forward, backward = ([ExchangeTime(e, None, None) for e in found] for found in (o.forward, o.backward))
        return replace(
            self._plain(o, share_run_again(o, policy)),
            forward=self._collectives(forward),
            backward=self._collectives(backward),
        )

    @staticmethod
    def _plain(o: Operator, repeated: float) -> OperatorPass:
        pairs, scores = (float(o.scores.pairs), float(o.scores.flops)) if o.scores else (0.0, 0.0)
        backward = 2.0 * float(o.flops - scores) + 2.5 * scores
        return OperatorPass(
            o.name, o.products, pairs, float(o.flops), backward, float(o.forward_bytes), repeated, None, None, None,
            (), (),
        )  # fmt: skip

    def _collectives(self, exchanges: Iterable[ExchangeTime]) -> tuple[Collective, ...]:
        """The collectives of an operator that move something under this plan."""
        found = []
        for of in exchanges:
            e, full = of.exchange, self._full_bytes(of.exchange)
            seconds = [None if s is None else float(s) for s in (of.seconds, of.exposed)]
            if full:
                found.append(Collective(e.kind, e.axis, full, self._sent(e, full), *seconds))
        return tuple(found)

    def _full_bytes(self, exchange: Exchange) -> float:
        """Bytes of the full tensor of a collective. Of tokens on their way to experts a row for each choice, as our
        runtime sends them; where tp shares the experts' matrices, each of its ranks sends the rows of all."""
        if exchange.axis == "ep" and exchange.size:
            return float(Share.of(self.job, expected_rows(self.job).sent)["rows to send"])
        return float(exchange.size)

    def _sent(self, exchange: Exchange, full_bytes: float) -> SentBytes:
        group: Group = getattr(self.groups, exchange.axis)
        if exchange.kind != "all_to_all":
            return ring_sent(group, full_bytes, 2 if exchange.kind == "all_reduce" else 1)
        experts, copies = self.run.shape.experts, 1.0
        if exchange.axis == "ep" and experts and self.software.expert_dedupe:
            copies = float(copies_sent(experts.topk, group.domains))
        return all_to_all_sent(group, full_bytes, copies)
