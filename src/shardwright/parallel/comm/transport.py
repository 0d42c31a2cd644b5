"""The transports that carry collectives and messages: a process group of torch.distributed, or, in a dry run, nothing.

A dry run does everything that a rank does, without other ranks: a collective is over at once, and leaves its result
buffer unchanged. So the requests of a rank are counted and sized as in a run, with the algorithms of the backend that
the dry run stands for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns at the old names; 2.11 knows only the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WorkHandle(Protocol):
    """A request to a transport that may still be under way."""

    def is_completed(self) -> bool:
        """True if it is over. Does not block."""
        ...

    def wait(self) -> Any:
        """Block until it is over; on CUDA only the stream waits."""
        ...


class JoinedWork:
    """Sends and receives that are waited for together."""

    def __init__(self, works: Sequence[WorkHandle]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """True if all are over."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until all are over."""
        for work in self._works:
            work.wait()


_OF_OTHERS = ("Connection closed by peer", "Connection reset", "Broken pipe", "Socket closed", "NCCL", "Timed out")
_OF_THIS_RANK = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "out of memory")


class FailedWork:
    """Work that could not begin, for the connection was lost. Waits report that, as for work that was under way."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def is_completed(self) -> bool:
        """True: nothing more will happen."""
        return True

    def wait(self) -> None:
        """Raise the error."""
        raise self._error


def start_or_fail(begin: Callable[[], Any]) -> Any:
    """The work that `begin` begins. Gloo begins no message to a rank that it knows to be gone, and raises instead."""
    try:
        return begin()
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        return FailedWork(error)


def is_lost_connection(error: Exception) -> bool:
    """True if an error says that another rank went away: Gloo and NCCL raise plain RuntimeErrors then. NCCL's errors of
    this rank's own calls and memory are none."""
    text = str(error)
    is_own = "NCCL" in text and any(sign in text for sign in _OF_THIS_RANK)
    return isinstance(error, RuntimeError) and not is_own and any(sign in text for sign in _OF_OTHERS)


class Transport(Protocol):
    """Carries the collectives and messages of one group of ranks. Each call only begins its work. Ranks are numbers in
    the world."""

    @property
    def is_gloo(self) -> bool:
        """True if the backend is Gloo, whose own all-gather and reduce-scatter copy or send more than they need."""
        ...

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        """Reduce `x` in place."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> WorkHandle:
        """Put each rank's `x` into `out`, along dim 0. Shapes [n, ...] and [n * size, ...]."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor) -> WorkHandle:
        """Put this rank's share of the sum of `x` into `out`. Shapes [n * size, ...] and [n, ...]."""
        ...

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
    ) -> WorkHandle:
        """Send each rank its share of dim 0 of `x`. Splits are in rows; without them shares are equal."""
        ...

    def broadcast(self, x: Tensor, source: int) -> WorkHandle:
        """Overwrite `x` with the `x` of rank `source`."""
        ...

    def reduce(self, x: Tensor, target: int, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        """Reduce `x` into the `x` of rank `target`; that of other ranks has no meaning afterwards."""
        ...

    def scatter(self, out: Tensor, shares: list[Tensor] | None, source: int) -> WorkHandle:
        """Put this rank's share of those of rank `source` into `out`. Other ranks give none."""
        ...

    def gather(self, parts: list[Tensor] | None, x: Tensor, target: int) -> WorkHandle:
        """Put each rank's `x` into the `parts` of rank `target`. Other ranks give none."""
        ...

    def send(self, x: Tensor, to: int, tag: int = 0) -> WorkHandle:
        """Send to a rank. Over Gloo a receive takes the message with its own `tag`."""
        ...

    def recv(self, out: Tensor, source: int, tag: int = 0) -> WorkHandle:
        """Receive from a rank."""
        ...

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> list[WorkHandle]:
        """Send and receive as one operation: if every rank sent before it receives, NCCL would wait for ever."""
        ...


@dataclass(frozen=True)
class GroupTransport:
    """A process group of torch.distributed.

    Messages to a lower rank of the world use a group of their own, `downwards`, if there is one. Gloo's thread for a
    connection polls its lock while a sender holds it. If both directions shared a connection, a message that arrives
    would be handled only when the scheduler takes that thread off the sender's core, milliseconds later.
    """

    group: dist.ProcessGroup
    downwards: dist.ProcessGroup | None = None

    @property
    def is_gloo(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Any:
        return dist.all_reduce(x, op, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return _all_gather(out, x, group=self.group, async_op=True)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        return _reduce_scatter(out, x, group=self.group, async_op=True)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
    ) -> Any:
        out_rows, in_rows = (None if splits is None else list(splits) for splits in (out_splits, in_splits))
        return dist.all_to_all_single(out, x, out_rows, in_rows, group=self.group, async_op=True)

    def broadcast(self, x: Tensor, source: int) -> Any:
        return dist.broadcast(x, source, group=self.group, async_op=True)

    def reduce(self, x: Tensor, target: int, op: dist.ReduceOp.RedOpType) -> Any:
        return dist.reduce(x, target, op, group=self.group, async_op=True)

    def scatter(self, out: Tensor, shares: list[Tensor] | None, source: int) -> Any:
        return dist.scatter(out, shares, source, group=self.group, async_op=True)

    def gather(self, parts: list[Tensor] | None, x: Tensor, target: int) -> Any:
        return dist.gather(x, parts, target, group=self.group, async_op=True)

    def send(self, x: Tensor, to: int, tag: int = 0) -> Any:
        group = self._group_for(dist.get_rank(), to)
        return start_or_fail(lambda: dist.isend(x, to, group=group, tag=tag))

    def recv(self, out: Tensor, source: int, tag: int = 0) -> Any:
        group = self._group_for(source, dist.get_rank())
        return start_or_fail(lambda: dist.irecv(out, source, group=group, tag=tag))

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> list[Any]:
        operations = [dist.P2POp(dist.isend, x, to, self.group), dist.P2POp(dist.irecv, out, source, self.group)]
        return list(dist.batch_isend_irecv(operations))

    def _group_for(self, source: int, to: int) -> dist.ProcessGroup:
        """The group that carries messages from one rank to another."""
        return self.downwards if self.downwards is not None and to < source else self.group


class _CompletedWork:
    """Work that is over already."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


@dataclass(frozen=True)
class DryTransport:
    """A transport without other ranks: every collective is over at once, and leaves its result buffer unchanged."""

    is_gloo: bool

    def request(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> WorkHandle:
        """A request, with the tensors that it reads and writes."""
        return _CompletedWork()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        return self.request("all_reduce", [x], [x])

    def all_gather(self, out: Tensor, x: Tensor) -> WorkHandle:
        return self.request("all_gather", [x], [out])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> WorkHandle:
        return self.request("reduce_scatter", [x], [out])

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
    ) -> WorkHandle:
        return self.request("all_to_all", [x], [out])

    def broadcast(self, x: Tensor, source: int) -> WorkHandle:
        return self.request("broadcast", [x], [x])

    def reduce(self, x: Tensor, target: int, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        return self.request("reduce", [x], [x])

    def scatter(self, out: Tensor, shares: list[Tensor] | None, source: int) -> WorkHandle:
        return self.request("scatter", shares or [], [out])

    def gather(self, parts: list[Tensor] | None, x: Tensor, target: int) -> WorkHandle:
        return self.request("gather", [x], parts or [])

    def send(self, x: Tensor, to: int, tag: int = 0) -> WorkHandle:
        return self.request("send", [x], [])

    def recv(self, out: Tensor, source: int, tag: int = 0) -> WorkHandle:
        return self.request("recv", [], [out])

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> list[WorkHandle]:
        return [self.request("exchange", [x], [out])]
