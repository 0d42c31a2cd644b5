"""What one microbatch costs on one pipeline rank: its layers' kernels and what of their collectives nothing hides."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.cost.calibration import Constants, Rates, constant, device_of, rates_of, software_of
from shardwright.cost.collectives import Group, all_to_all_s, copies_sent, group_of, ring_pass_s, ring_s
from shardwright.cost.kernels import operator_s
from shardwright.spec.software import SoftwareSpec
from shardwright.workload.layers import Chain, chains, share_run_again
from shardwright.workload.operators import HALF, Exchange
from shardwright.workload.shape import Run


@dataclass(frozen=True)
class PieceTime:
    """Seconds of a piece (a layer, the embedding, the head, or several) for one microbatch on one rank.

    `tensor`, `context`, `expert` and `shard` are collectives that nothing hides, of forward and backward together, and
    `*_forward` the forward's part of all of them; `again` is computing again. FLOPs are of the forward.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    again: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    shard: float = 0.0
    exposed_forward: float = 0.0
    flops: float = 0.0
    flops_again: float = 0.0

    def __add__(self, other: "PieceTime") -> "PieceTime":
        return PieceTime(*map(float.__add__, self.values(), other.values()))

    def times(self, count: float) -> "PieceTime":
        """`count` such pieces."""
        return PieceTime(*(count * value for value in self.values()))

    def values(self) -> tuple[float, ...]:
        """All fields, in their order: dataclasses.astuple takes fifty times as long."""
        return (
            self.forward, self.input_grad, self.weight_grad, self.again, self.tensor, self.context, self.expert,
            self.shard, self.exposed_forward, self.flops, self.flops_again,
        )  # fmt: skip

    def with_again(self, share: float) -> "PieceTime":
        """The same where only a share of the layers is computed again."""
        return replace(self, again=share * self.again, flops_again=share * self.flops_again)

    @property
    def exposed(self) -> float:
        """All communication that nothing hides."""
        return self.tensor + self.context + self.expert + self.shard

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad + self.again + self.exposed


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of each axis, by where they lie: tp fastest, then cp, dp, pp; ep folds dp x cp x tp."""

    tp: Group
    cp: Group
    ep: Group
    replicas: Group
    expert_replicas: Group
    shard: Group
    copies: Group

    @classmethod
    def of(cls, run: Run) -> "Groups":
        """Of a run."""
        cut, domain = run.cut, max(1, run.devices_per_node)
        inner = cut.expert_tp * cut.ep
        shard_size = cut.zero_ranks if 0 < cut.zero_ranks < cut.replicas else cut.replicas
        return cls(
            tp=group_of(cut.tp, 1, domain),
            cp=group_of(cut.cp, cut.tp, domain),
            ep=group_of(cut.ep, cut.expert_tp, domain),
            replicas=group_of(cut.replicas, cut.tp, domain),
            expert_replicas=group_of(cut.expert_replicas, inner, domain),
            shard=group_of(shard_size, cut.tp, domain),
            copies=group_of(cut.replicas // shard_size, cut.tp * shard_size, domain),
        )


_ROUTED = ("up", "activation", "down")

_groups = lru_cache(maxsize=4096)(Groups.of)


@lru_cache(maxsize=4096)
def _pieces(run: Run) -> dict[str, Chain]:
    return chains(run.shape, run.cut, software_of(run.software))


@dataclass(frozen=True)
class Costing:
    """All that prices one run."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    groups: Groups
    pieces: Mapping[str, Chain]
    tensor_exposed: float  # share of a tensor-parallel collective that overlapping with its product leaves
    is_narrow: bool

    @classmethod
    def of(cls, run: Run, constants: Constants) -> "Costing":
        """KeyError says what is not known."""
        software = software_of(run.software)
        hidden = software.tensor_overlap and run.cut.sequence_parallel
        left = constant(constants, device_of(run.device).generation, "tensor_exposed") if hidden else 1.0
        is_narrow = run.cut.precision in ("fp8", "mxfp8", "nvfp4")
        return cls(run, software, rates_of(run, constants), _groups(run), _pieces(run), left, is_narrow)

    def exchange_s(self, exchange: Exchange) -> float:
        """A collective of an operator by itself."""
        rates, groups = self.rates, self.groups
        if exchange.axis == "ep":
            copies = 1.0
            if self.software.expert_dedupe and self.run.shape.experts:
                copies = copies_sent(self.run.shape.experts.topk, groups.ep.domains)
            return all_to_all_s(rates, groups.ep, exchange.size, copies) * rates.imbalance
        if exchange.axis == "cp":
            return ring_pass_s(rates, groups.cp, exchange.size)
        rounds = 2 if exchange.kind == "all_reduce" else 1
        return ring_s(rates, groups.tp, exchange.size, rounds) * rates.tensor_factor

    def piece(self, kind: str) -> PieceTime:
        """One layer of a kind, the embedding or the head."""
        cut, rates = self.run.cut, self.rates
        is_layer = kind in ("dense", "experts")
        policy = cut.recompute if is_layer else "none"
        is_narrow = self.is_narrow and is_layer
        forward = input_grad = weight_grad = again = flops = flops_again = exposed_forward = 0.0
        exposed = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        for operator in self.pieces[kind]:
            t = operator_s(rates, self.software, operator, is_narrow)
            more = rates.imbalance if kind == "experts" and operator.name in _ROUTED else 1.0
            forward += more * t.forward
            input_grad += more * t.input_grad
            weight_grad += more * t.weight_grad
            flops += operator.flops
            repeated = share_run_again(operator, policy)
            again += repeated * more * t.forward
            flops_again += repeated * operator.flops
            for axis, seconds in self._exposed(operator.forward, t.forward):
                exposed[axis] += (1 + repeated) * seconds
                exposed_forward += seconds
            for axis, seconds in self._exposed(operator.backward, t.input_grad + t.weight_grad):
                exposed[axis] += seconds
        if is_layer:
            gap = rates.gap_s * self.software.kernels[0]
            forward, again = forward + gap, again + (gap if policy == "full" else 0.0)
            input_grad += rates.gap_s * self.software.kernels[1]
        return PieceTime(
            forward, input_grad, weight_grad, again, exposed["tp"], exposed["cp"], exposed["ep"],
            0.0, exposed_forward, flops, flops_again,
        )  # fmt: skip

    def _exposed(self, exchanges: tuple[Exchange, ...], compute_s: float) -> Iterator[tuple[str, float]]:
        """What of an operator's collectives is not hidden, each with its axis."""
        for number, exchange in enumerate(exchanges):
            seconds = self.exchange_s(exchange)
            if exchange.axis == "cp":  # the next keys come while these are used
                seconds = max(0.0, seconds - compute_s) + self.rates.leak * min(seconds, compute_s)
            elif exchange.axis == "tp":
                # The second one of a backward brings the saved input back while the input gradient is computed.
                seconds *= self.rates.leak if number else self.tensor_exposed
            elif self.run.cut.schedule.startswith("dualpipe"):  # another microbatch computes meanwhile
                seconds *= self.rates.leak
            elif self.software.expert_overlap:
                seconds *= self.rates.expert_exposed
            yield exchange.axis, seconds

    def sharded(self, piece: PieceTime, parameters: float, group: Group) -> PieceTime:
        """A piece whose parameters are gathered before and whose gradients are scattered after (ZeRO-3)."""
        rates = self.rates
        gather = ring_s(rates, group, HALF * parameters)
        scatter = ring_s(rates, group, self.software.reduce_bytes * parameters)
        if self.groups.copies.size > 1:
            scatter += ring_s(rates, self.groups.copies, self.software.reduce_bytes * parameters / group.size, 2)
        ahead = piece.forward
        behind = piece.input_grad + piece.weight_grad + piece.again
        first = max(0.0, gather - ahead) + rates.leak * min(gather, ahead)
        second = max(0.0, gather + scatter - behind) + rates.leak * min(gather + scatter, behind)
        return piece + PieceTime(shard=first + second, exposed_forward=first)
