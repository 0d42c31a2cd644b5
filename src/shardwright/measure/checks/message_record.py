"""A record of all requests of ranks to their communicators, and of each wait for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.measure.meta_results import MadeOnce
from shardwright.parallel.comm.process_groups import Connect
from shardwright.parallel.comm.transport import DryTransport, JoinedWork, Transport, WorkHandle
from shardwright.train.dry_steps import DrySteps


@dataclass(frozen=True)
class Communicator:
    """A communicator of some ranks: the `number`-th that each of them made."""

    number: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return say("communicator {number} of ranks {ranks}", number=self.number, ranks=tuple(map(str, self.ranks)))


@dataclass(frozen=True)
class Operation:
    """A collective or a message as one rank requests it. Ranks are those of the world; -1 is none."""

    kind: str
    communicator: Communicator
    num_bytes: int
    to: int = -1
    source: int = -1

    def __str__(self) -> str:
        request: str = self.kind
        if self.to >= 0:
            request = say("{request} to {rank}", request=request, rank=self.to)
        if self.source >= 0:
            request = say("{request} from {rank}", request=request, rank=self.source)
        communicator = str(self.communicator)
        return say(
            "{request} of {bytes:,} bytes on {communicator}",
            request=request,
            bytes=self.num_bytes,
            communicator=communicator,
        )


@dataclass(frozen=True)
class IssueOrWait:
    """The moment at which an operation is issued, or waited for; `operation` is its index in the record."""

    operation: int
    is_wait: bool


@dataclass
class MessageRecord:
    """The actions of one rank, in its order."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    moments: list[IssueOrWait] = field(default_factory=list)
    num_communicators: int = 0

    def issue(self, operation: Operation) -> int:
        """Record an operation. Returns its index in the record."""
        self.operations.append(operation)
        self.moments.append(IssueOrWait(len(self.operations) - 1, is_wait=False))
        return len(self.operations) - 1

    def wait(self, operation: int) -> None:
        """Record that the rank goes on only when this operation is over."""
        self.moments.append(IssueOrWait(operation, is_wait=True))

    def connecting(self, connect: Connect) -> Connect:
        """A maker of the communicators that `connect` makes, which records the requests to them."""

        def recorded(lines: list[list[int]]) -> Transport | None:
            self.num_communicators += 1
            transport = connect(lines)
            own_line = next((line for line in lines if self.rank in line), [self.rank])
            if transport is None or len(own_line) == 1:
                return transport
            return RecordedTransport(transport, self, Communicator(self.num_communicators, tuple(own_line)))

        return recorded


@dataclass(frozen=True)
class _RecordedWork:
    """A requested collective, whose wait is recorded. If an operation has several works, the first one records it."""

    work: WorkHandle
    record: MessageRecord
    operation: int

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> Any:
        self.record.wait(self.operation)
        return self.work.wait()


@dataclass(frozen=True)
class RecordedTransport:
    """A transport that records all requests. Its collectives are those of NCCL, whatever carries them."""

    inner: Transport
    record: MessageRecord
    communicator: Communicator

    @property
    def is_gloo(self) -> bool:
        return False

    def _noted(self, work: WorkHandle, kind: str, x: Tensor, to: int = -1, source: int = -1) -> _RecordedWork:
        operation = Operation(kind, self.communicator, x.nbytes, to, source)
        return _RecordedWork(work, self.record, self.record.issue(operation))

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        return self._noted(self.inner.all_reduce(x, op), f"all_reduce {op}", x)

    def all_gather(self, out: Tensor, x: Tensor) -> WorkHandle:
        return self._noted(self.inner.all_gather(out, x), "all_gather", out)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> WorkHandle:
        return self._noted(self.inner.reduce_scatter(out, x), "reduce_scatter", x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
    ) -> WorkHandle:
        kind = "all_to_all" if out_splits is None else "all_to_all_v"
        return self._noted(self.inner.all_to_all(out, x, out_splits, in_splits), kind, x)

    def broadcast(self, x: Tensor, source: int) -> WorkHandle:
        return self._noted(self.inner.broadcast(x, source), say("broadcast of rank {rank}", rank=source), x)

    def reduce(self, x: Tensor, target: int, op: dist.ReduceOp.RedOpType) -> WorkHandle:
        return self._noted(self.inner.reduce(x, target, op), f"reduce {op} into rank {target}", x)

    def scatter(self, out: Tensor, shares: list[Tensor] | None, source: int) -> WorkHandle:
        return self._noted(self.inner.scatter(out, shares, source), say("scatter of rank {rank}", rank=source), out)

    def gather(self, parts: list[Tensor] | None, x: Tensor, target: int) -> WorkHandle:
        return self._noted(self.inner.gather(parts, x, target), say("gather into rank {rank}", rank=target), x)

    def send(self, x: Tensor, to: int, tag: int = 0) -> WorkHandle:
        return self._noted(self.inner.send(x, to, tag), "send", x, to=to)

    def recv(self, out: Tensor, source: int, tag: int = 0) -> WorkHandle:
        return self._noted(self.inner.recv(out, source, tag), "recv", out, source=source)

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> list[WorkHandle]:
        works = self.inner.exchange(out, x, to, source)
        return [self._noted(JoinedWork(works), "exchange", x, to=to, source=source)]


def recorded_steps(job: JobSpec) -> list[MessageRecord]:
    """The requests of each rank of a job on CUDA in consecutive steps: twice as many as fill its pipeline. Nothing is
    sent."""
    records = []
    with MadeOnce():
        for rank in range(job.plan.world):
            record = MessageRecord(rank)
            steps = DrySteps(job, rank, "cuda", record.connecting(lambda lines: DryTransport(is_gloo=False)))
            for _ in range(2):
                steps.run()
            records.append(record)
    return records
