"""The only caller of torch.distributed's collectives: every byte that crosses ranks passes here.

So each collective is named by its mesh axis, counted, timed and watched. An axis of size 1 communicates nothing and
counts nothing. Collectives with a gradient, at the borders of a region of the model, are in regions.py. The leading
dim is gathered and scattered, so that no copy is needed before or after.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.units import MIB
from shardwright.parallel.comm.compute_turns import Turns
from shardwright.parallel.comm.hang_watch import Watch, explained
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.transport import JoinedWork, Transport, WorkHandle
from shardwright.parallel.device_streams import DeviceStreams, host_reading

# Distinguishes messages of an exchange from messages of a pipeline, if they ever share a group.
EXCHANGE_TAG = 2**30
# Two ranks that reduce no more than this send each other their whole tensor, and both add: this takes as many bytes as
# a ring, but one message to wait for, while Gloo's ring takes several. Larger tensors gain nothing.
_SMALL_BYTES = MIB
_OPERATIONS: dict[Any, Callable[..., Tensor]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as one rank sees it: the ranks on its line along that axis, and its index among them.

    `transport` carries its collectives. If a forward and a backward pass run side by side, `backward_transport` carries
    those of the backward pass. `by_node` is set if the line spans nodes and its traffic must respect node borders.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    transport: Transport | None
    ledger: Ledger
    watch: Watch | None
    backward_transport: Transport | None = None
    turns: Turns = field(default_factory=Turns)
    by_node: "NodeAxes | None" = None

    @property
    def communicator(self) -> Transport:
        """The transport of a collective that this thread issues now.

        If a forward and a backward run side by side, each pass has its own transport. An axis with one transport
        belongs to the backward, which reduces gradients on it: a forward on the same transport would mix up its
        messages with those of the backward.
        """
        running = self.turns.beside
        assert running != "forward" or self.backward_transport is not None, (
            f"a forward beside a backward may not use axis {self.name}, which has one communicator for both"
        )
        transport = self.backward_transport if running == "backward" and self.backward_transport else self.transport
        assert transport is not None, f"axis {self.name} has one rank"
        return transport

    def alone(self, name: str) -> "Axis":
        """An axis on which this rank is alone."""
        return Axis(name, (self.ranks[self.index],), 0, None, ledger=self.ledger, watch=self.watch, turns=self.turns)

    @property
    def kind(self) -> str:
        """The kind of device whose kernels are used: cpu or cuda."""
        return self.ledger.kind or self.ledger.device.type

    @property
    def streams(self) -> DeviceStreams | None:
        """The streams of this rank's device; None if it has none."""
        return self.ledger.streams

    def numbers_or(self, values_N: Tensor, dry: list[int]) -> list[int]:
        """The integers in a tensor, for which the host waits; `dry` if the tensor has no values."""
        with host_reading(self.streams, values_N):
            return dry if values_N.is_meta else [int(value) for value in values_N.tolist()]

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class NodeAxes:
    """An axis split at node borders. Each node has n of the axis's ranks: index i of the axis is index i // n of
    `between`, which joins the ranks with the same place in their nodes, and i % n of `inside`, which joins the ranks
    of one node."""

    between: Axis
    inside: Axis


class Pending:
    """A collective under way. `wait` blocks until its result may be used; the operands must live until then."""

    def __init__(self, work: Any, axis: Axis, activity: str = "", peers: tuple[int, ...] = ()) -> None:
        self._work = work
        self._axis = axis
        self._activity = activity
        self._peers = peers
        self._finish: Callable[[], None] | None = None

    def then(self, finish: Callable[[], None]) -> "Pending":
        """This, of which `finish` is the last part: what is called when the rest is over."""
        self._finish = finish
        return self

    def is_over(self) -> bool:
        """True if nothing is left to wait for. Does not block."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, keeps_turn: bool = False) -> None:
        """Block, timed and watched. On CUDA only the stream waits.

        If another pass runs side by side, it computes meanwhile, unless this pass keeps its turn. A forward may keep
        the turn: this cannot deadlock, but forwards and backwards that keep it on two ranks could. A pass that has
        already waited for a later message may keep it too: the earlier message arrives whichever pass computes.
        """
        if self._work is None:
            return
        axis = self._axis
        with axis.turns.waiting(keeps_turn), axis.ledger.blocked(axis.name, keeps_turn):
            activity = f"{self._activity} on axis {axis.name}"
            try:
                with nullcontext() if axis.watch is None else axis.watch.waiting(activity, self._peers):
                    self._work.wait()
                if axis.watch is not None and axis.ledger.device.type == "cuda":  # only the stream has waited
                    axis.watch.under_way(self._work, activity, self._peers)
            except RuntimeError as error:
                if (explanation := explained(error, axis.watch, activity, self._peers)) is not error:
                    raise explanation from error
                raise
        self._work = None
        if self._finish is not None:
            self._finish()


def _start(
    axis: Axis, kind: str, num_bytes: int, work: Any, sent_bytes: Mapping[int, int], peer: int | None = None
) -> Pending:
    axis.ledger.record(kind, axis.name, num_bytes, sent_bytes)
    peers = tuple(rank for i, rank in enumerate(axis.ranks) if i != axis.index) if peer is None else (peer,)
    return Pending(work, axis, f"{kind} of {num_bytes} bytes", peers)


def _sent_in_ring(axis: Axis, num_bytes: int) -> dict[int, int]:
    """The bytes that this rank sends, by receiving rank, if it sends `num_bytes` to its neighbour in a ring."""
    return {axis.ranks[(axis.index + 1) % axis.size]: num_bytes}


def _sent_to_each(axis: Axis, num_bytes: int) -> dict[int, int]:
    """The bytes that this rank sends, by receiving rank, if it sends `num_bytes` to every other rank."""
    return {rank: num_bytes for i, rank in enumerate(axis.ranks) if i != axis.index}


def _copied(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    out.copy_(x)
    return Pending(None, axis)


def start_all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Reduce `x` in place over the axis."""
    if axis.size == 1:
        return Pending(None, axis)
    if axis.size == 2 and x.nbytes <= _SMALL_BYTES and op in _OPERATIONS and _is_gloo(axis):
        received = torch.empty_like(x)

        def reduce() -> None:
            _OPERATIONS[op](x, received, out=x)

        exchange = _exchange([x, x], [received, received], axis)
        return _start(axis, "all_reduce", x.nbytes, exchange, _sent_to_each(axis, x.nbytes)).then(reduce)
    work = axis.communicator.all_reduce(x, op)
    return _start(axis, "all_reduce", x.nbytes, work, _sent_in_ring(axis, 2 * (axis.size - 1) * x.nbytes // axis.size))


def start_all_gather(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Concatenate each rank's `x` along dim 0 into `out`. Shapes [n, ...] and [n * size, ...].

    `x` may be this rank's part of `out`. Over Gloo each rank sends its part directly to every other rank, into its
    place in `out`: as many bytes as a ring, without the copies of Gloo's own all-gather.
    """
    if axis.size == 1:
        return _copied(out, x, axis)
    x = x.contiguous()
    if not _is_gloo(axis):
        work = axis.communicator.all_gather(out, x)
        return _start(axis, "all_gather", out.nbytes, work, _sent_in_ring(axis, out.nbytes - x.nbytes))
    parts = out.chunk(axis.size)
    if parts[axis.index].data_ptr() != x.data_ptr():
        parts[axis.index].copy_(x)
    return _start(
        axis, "all_gather", out.nbytes, _exchange([x] * axis.size, parts, axis), _sent_to_each(axis, x.nbytes)
    )


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Sum `x` over the axis and keep this rank's share of dim 0. Shapes [n, ...] and [n * size, ...].

    `out` may be this rank's share of `x`. Gloo's own reduce-scatter sends as many bytes as an all-reduce, twice as many
    as needed. So over Gloo each rank sends every other rank its share, and the receiver adds the shares in float32.
    """
    if axis.size == 1:
        return _copied(out, x, axis)
    x = x.contiguous()
    if not _is_gloo(axis):
        work = axis.communicator.reduce_scatter(out, x)
        return _start(axis, "reduce_scatter", x.nbytes, work, _sent_in_ring(axis, x.nbytes - out.nbytes))
    shares = x.chunk(axis.size)
    arriving = x.new_empty(axis.size - 1, *out.shape)
    buffers = iter(arriving)
    received = [shares[i] if i == axis.index else next(buffers) for i in range(axis.size)]

    def add_up() -> None:
        own_share = shares[axis.index]
        if axis.size > 2 and x.dtype != torch.float32:  # more than one addition, and only the last may round
            out.copy_(own_share.float() + arriving.sum(dim=0, dtype=torch.float32))
            return
        torch.add(own_share, arriving[0], out=out)
        for share in arriving[1:]:
            out.add_(share)

    exchange = _exchange(shares, received, axis)
    return _start(axis, "reduce_scatter", x.nbytes, exchange, _sent_to_each(axis, out.nbytes)).then(add_up)


def _is_gloo(axis: Axis) -> bool:
    return axis.transport is not None and axis.transport.is_gloo


def _exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis) -> JoinedWork:
    """Send `outgoing[i]` to index i and receive `incoming[i]` from it, for every other index i of the axis.

    Messages between two ranks arrive in the order in which they were sent, so several exchanges may be under way at
    once. Each rank begins with its neighbour, so that not all ranks send to the same one. Empty tensors, which both
    sides know to be empty, are not sent.
    """
    transport = axis.communicator
    peers = [(axis.index + step) % axis.size for step in range(1, axis.size)]
    works = [transport.recv(incoming[i], axis.ranks[i], EXCHANGE_TAG) for i in reversed(peers) if incoming[i].numel()]
    works += [transport.send(outgoing[i], axis.ranks[i], EXCHANGE_TAG) for i in peers if outgoing[i].numel()]
    return JoinedWork(works)


def start_all_to_all(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send share i of dim 0 of `x` to index i, and receive share i of `out` from it. Both shapes [n * size, ...]."""
    if axis.size == 1:
        return _copied(out, x, axis)
    work = axis.communicator.all_to_all(out, x.contiguous())
    return _start(axis, "all_to_all", x.nbytes, work, _sent_to_each(axis, x.nbytes // axis.size))


def start_all_to_all_v(
    out: Tensor, x: Tensor, axis: Axis, out_splits: Sequence[int], in_splits: Sequence[int]
) -> Pending:
    """Begin to exchange shares of any size: send `in_splits[i]` rows of `x` to index i, receive `out_splits[i]` rows.

    Shapes of `x` and `out`: [sum of in_splits, ...] and [sum of out_splits, ...], rows in the order of the indices. A
    split may be 0.
    """
    if axis.size == 1:
        return _copied(out, x, axis)
    x = x.contiguous()
    row_bytes = x.shape[1:].numel() * x.element_size()
    sent_bytes = {axis.ranks[i]: split * row_bytes for i, split in enumerate(in_splits) if i != axis.index and split}
    work: WorkHandle
    if not _is_gloo(axis):
        work = axis.communicator.all_to_all(out, x, out_splits, in_splits)
    else:
        outgoing, incoming = x.split(list(in_splits)), out.split(list(out_splits))
        incoming[axis.index].copy_(outgoing[axis.index])
        work = _exchange(outgoing, incoming, axis)
    return _start(axis, "all_to_all_v", sum(sent_bytes.values()), work, sent_bytes)


def start_exchange(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send `x` to the next index of the axis, in a ring, and receive the previous index's tensor into `out`."""
    if axis.size == 1:
        return _copied(out, x, axis)
    target, source = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    transport = axis.communicator
    if _is_gloo(axis):
        receipt = transport.recv(out, source, EXCHANGE_TAG)
        work = JoinedWork([receipt, transport.send(x, target, EXCHANGE_TAG)])
    else:
        work = JoinedWork(transport.exchange(out, x, target, source))
    return _start(axis, "exchange", x.nbytes, work, {target: x.nbytes}, peer=source)


def _message_transport(axis: Axis) -> Transport:
    """The transport of an axis for messages of either pass: their tags tell them apart, so both passes may share it."""
    assert axis.transport is not None, f"axis {axis.name} has one rank"
    return axis.transport


def start_send(x: Tensor, axis: Axis, target: int, tag: int) -> Pending:
    """Send `x` to index `target` of the axis."""
    work = _message_transport(axis).send(x, axis.ranks[target], tag)
    return _start(axis, "send", x.nbytes, work, {axis.ranks[target]: x.nbytes}, peer=axis.ranks[target])


def start_recv(out: Tensor, axis: Axis, source: int, tag: int) -> Pending:
    """Receive into `out` from index `source` of the axis."""
    work = _message_transport(axis).recv(out, axis.ranks[source], tag)
    return _start(axis, "recv", out.nbytes, work, {}, peer=axis.ranks[source])


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over the axis, and return it."""
    start_all_reduce(x, axis, op).wait()
    return x


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over the axis, in place."""
    return all_reduce(x, axis, dist.ReduceOp.MAX)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate each rank's `x` along dim 0."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    start_all_gather(out, x, axis).wait()
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of dim 0 of the sum of `x` over the axis."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    start_reduce_scatter(out, x, axis).wait()
    return out


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send share i of dim 0 of `x` to index i; share i of the result comes from index i."""
    if axis.size == 1:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    start_all_to_all(out, x, axis).wait()
    return out


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrite `x` with the `x` of index `source` of the axis, and return it."""
    if axis.size > 1:
        work = axis.communicator.broadcast(x, axis.ranks[source])
        is_last = (axis.index + 1) % axis.size == source
        sent_bytes = {} if is_last else _sent_in_ring(axis, x.nbytes)
        _start(axis, "broadcast", x.nbytes, work, sent_bytes, peer=axis.ranks[source]).wait()
    return x


def reduce(x: Tensor, axis: Axis, target: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over the axis into the `x` of index `target`, and return it; elsewhere it has no meaning."""
    if axis.size > 1:
        work = axis.communicator.reduce(x, axis.ranks[target], op)
        sent_bytes = {} if axis.index == target else _sent_in_ring(axis, x.nbytes)
        _start(axis, "reduce", x.nbytes, work, sent_bytes).wait()
    return x


def scatter(out: Tensor, x: Tensor | None, axis: Axis, source: int) -> Tensor:
    """Overwrite `out` with this rank's share of dim 0 of the `x` of index `source`, and return it. Shapes [n, ...] and
    [n * size, ...]; other ranks give no `x`."""
    if axis.size == 1:
        return out if x is None else out.copy_(x)
    shares = None if x is None or axis.index != source else list(x.contiguous().chunk(axis.size))
    work = axis.communicator.scatter(out, shares, axis.ranks[source])
    sent_bytes = {} if shares is None else _sent_to_each(axis, out.nbytes)
    _start(axis, "scatter", axis.size * out.nbytes, work, sent_bytes, peer=axis.ranks[source]).wait()
    return out


def gather(out: Tensor | None, x: Tensor, axis: Axis, target: int) -> Tensor | None:
    """Concatenate each rank's `x` along dim 0 into the `out` of index `target`, and return it. Shapes [n, ...] and
    [n * size, ...]; other ranks give no `out`."""
    if axis.size == 1:
        return None if out is None else out.copy_(x)
    parts = None if out is None or axis.index != target else list(out.chunk(axis.size))
    work = axis.communicator.gather(parts, x.contiguous(), axis.ranks[target])
    sent_bytes = {} if axis.index == target else {axis.ranks[target]: x.nbytes}
    _start(axis, "gather", axis.size * x.nbytes, work, sent_bytes).wait()
    return out


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has called this."""
    if axis.size > 1:
        all_reduce(torch.zeros(1, device=axis.ledger.device), axis)
