"""A rank on CUDA without a device: its streams, events and copies to the host are recorded, with all accesses of
operators.

Tensors have no memory (torch's device meta); their maker decides if they count as host memory. Every operator of torch
passes through a dispatch mode, which records its reads and writes. Collectives read and write on streams of their
communicators, as NCCL's do (torch's ProcessGroupNCCL: they begin after the current stream, and the stream that waits
for their work waits for them; the work holds the tensors until then).
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.config.phrase import say
from shardwright.measure.checks.access_order import Access, Clock, FreedMemory, MemoryBlock, Worker
from shardwright.measure.memory_trace import line_of_ours
from shardwright.measure.meta_results import MetaResults
from shardwright.parallel.comm.process_groups import Connect
from shardwright.parallel.comm.transport import DryTransport, Transport
from shardwright.train.checkpoint.boxes import HeldBox

# Operators that make tensors like others, of which they read only the shape.
_SHAPES_ALONE = ("empty", "new_empty", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
_NOT_WRITTEN = ("empty", "new_empty")  # operators that give their results no values
_READERS = ("parallel/device_streams.py", "parallel/comm/process_groups.py")  # files through which others wait
_OVERWRITE = ("copy_", "zero_", "fill_", "normal_", "uniform_")  # operators that do not read what they write


@dataclass(frozen=True)
class RecordedEvent:
    """A point in a stream's work."""

    clock: Clock
    streams: "RecordedStreams"

    def synchronize(self) -> None:
        self.streams.order_host(self.clock)


@dataclass
class RecordedTimedEvent:
    """An event that measures time, of which there is none here: each lasts no time."""

    streams: "RecordedStreams"
    event: RecordedEvent | None = None

    def record(self) -> None:
        self.event = self.streams.current().record_event()

    def query(self) -> bool:
        assert self.event is not None, "an event is recorded before the host asks for it"
        return self.streams.host.has_waited_for(self.event.clock)

    def synchronize(self) -> None:
        assert self.event is not None, "an event is recorded before the host waits for it"
        self.event.synchronize()

    def elapsed_time(self, end: "RecordedTimedEvent") -> float:
        if not end.query():  # torch raises an error then
            fault = say("nothing lets the host wait for events whose times it reads, {place}", place=line_of_ours())
            self.streams.faults[fault] = None
        return 0.0


@dataclass(frozen=True)
class RecordedStream:
    """A stream whose waits are recorded."""

    worker: Worker
    streams: "RecordedStreams"

    def wait_stream(self, stream: "RecordedStream") -> None:
        self.worker.wait_for(stream.worker.clock)

    def wait_event(self, event: RecordedEvent) -> None:
        self.worker.wait_for(event.clock)

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(dict(self.worker.clock), self.streams)


class RecordedStreams:
    """The streams of an absent device (parallel/device_streams.py). `faults` has each fault once, `waits` the lines at
    which the host waited for the device since they were cleared."""

    def __init__(self) -> None:
        self.host = Worker(0, say("the host"))
        self.faults: dict[str, None] = {}
        self.waits: list[str] = []
        self.num_accesses = 0
        self._num_workers = 1
        self._makes_host_memory = False
        self._memory = FreedMemory()
        self._blocks: dict[int, MemoryBlock] = {}
        self._current = self.made(say("the stream that computes"))

    # The interface for the rank.

    def current(self) -> RecordedStream:
        return self._current

    def made(self, name: str = "") -> RecordedStream:
        self._num_workers += 1
        name = name or say("the stream made at {place}", place=line_of_ours())
        return RecordedStream(Worker(self._num_workers - 1, name, dict(self.host.clock)), self)

    @contextmanager
    def using(self, stream: RecordedStream) -> Iterator[None]:
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous

    def timed_event(self) -> RecordedTimedEvent:
        return RecordedTimedEvent(self)

    def lend(self, x: Tensor, stream: RecordedStream) -> None:
        self._block(x).lent[stream.worker.number] = stream.worker

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._made_on_host(shape, dtype, is_safe=False)

    def sent(self, values: Tensor) -> tuple[Tensor, RecordedEvent]:
        copy = self._made_on_host(values.shape, values.dtype, is_safe=True)
        copy.copy_(values, non_blocking=True)
        return copy, self._current.record_event()

    def brought(self, values: Tensor) -> Tensor:
        """A copy on the device. torch pins the host's values; the current stream owns and writes the copy."""
        x = torch.empty(values.shape, dtype=values.dtype, device="meta")
        self.access(self._launched(), say("brought from the host"), writes=[x])
        return x

    def is_on_host(self, x: Tensor) -> bool:
        return x.device.type == "cpu" or self._block(x).stream is None

    def host_reads(self, x: Tensor) -> AbstractContextManager[None]:
        if not self.is_on_host(x):
            self.order_host(self._launched().clock)
        self.access(self.host, say("the host reads numbers"), reads=[x])
        return nullcontext()

    def host_waits(self) -> AbstractContextManager[None]:
        return nullcontext()  # the wait itself is recorded

    def host_writes_files(self, boxes: Sequence[HeldBox]) -> None:
        """Record that the host reads the contents of a checkpoint."""
        self.access(self.host, say("written to a file"), reads=[box.values for box in boxes if box.values.is_meta])

    def order_host(self, clock: Clock) -> None:
        """Order all work of `clock` before the host's next work."""
        self.waits.append(line_of_ours(passed_over=_READERS))
        self.host.wait_for(clock)

    # The records.

    def _launched(self) -> Worker:
        """The current stream, after a launch by the host: ordered after all that the host has done."""
        worker = self._current.worker
        worker.wait_for(self.host.clock)
        return worker

    def _made_on_host(self, shape: Sequence[int], dtype: torch.dtype, is_safe: bool) -> Tensor:
        """A tensor that represents one in host memory."""
        self._makes_host_memory = True
        x = torch.empty(shape, dtype=dtype, device="meta")
        self._makes_host_memory = False
        block = self._block(x)
        block.stream, block.is_safe = None, is_safe
        if not is_safe:
            self._note(self._memory.handed_out(block, self.host))
        return x

    def _block(self, x: Tensor) -> MemoryBlock:
        """The memory of a tensor; new memory belongs to the current stream."""
        storage = x.untyped_storage()
        number = id(storage)
        if number not in self._blocks:
            self._blocks[number] = MemoryBlock(storage.nbytes(), line_of_ours(), self._current.worker)
            weakref.finalize(storage, self._forget, number).atexit = False
        return self._blocks[number]

    def _make(self, block: MemoryBlock) -> None:
        """Give memory to the current stream. Others must use it after this point of the stream, because the stream may
        have used the same memory before."""
        worker = self._launched()
        self._note(self._memory.handed_out(block, worker))
        count = worker.works()
        self._note(block.access(Access(worker, count, 0, block.num_bytes, True, say("made, {line}", line=block.made))))

    def _forget(self, number: int) -> None:
        self._memory.let_go(self._blocks.pop(number))

    def _note(self, faults: Iterator[str]) -> None:
        for fault in faults:
            self.faults[fault] = None

    def access(self, worker: Worker, work: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Record that a worker reads and writes tensors, as one piece of work."""
        count, line = worker.works(), line_of_ours()
        for tensors, is_write in ((reads, False), (writes, True)):
            for x in tensors:
                low, high = _bytes_of(x)
                if low < high:
                    self.num_accesses += 1
                    access = Access(worker, count, low, high, is_write, say("{work}, {line}", work=work, line=line))
                    self._note(self._block(x).access(access))

    def ran(self, call: "OperatorCall") -> None:
        """Record an operator on the current stream; or on the host, if all of its tensors lie there. The host waits for
        the end of a copy between the two, unless it is non-blocking."""
        if self._makes_host_memory:
            return
        on_host = [self.is_on_host(x) for x in call.inputs if x.numel()]
        is_of_host = bool(on_host) and all(on_host)
        for x in call.results:
            block = self._block(x)
            if is_of_host:
                block.stream, block.is_safe = None, True
            else:
                self._make(block)
        worker = self.host if is_of_host else self._launched()
        filled = [] if call.name.startswith(_NOT_WRITTEN) else call.results
        self.access(worker, call.name, call.reads, [*call.writes, *filled])
        if any(on_host) and not is_of_host and call.blocks:
            self.order_host(worker.clock)

    def connecting(self, connect: Connect) -> Connect:
        """A maker of the communicators that `connect` makes, each with a stream of its own."""

        def recorded(lines: list[list[int]]) -> Transport | None:
            if connect(lines) is None:
                return None
            return StreamedTransport(False, self, self.made(say("a stream of NCCL")))

        return recorded


@dataclass(frozen=True)
class _StreamedWork:
    """A collective under way, which holds its tensors."""

    end: RecordedEvent
    tensors: list[Tensor]

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.end.streams.current().wait_event(self.end)
        self.tensors.clear()


@dataclass(frozen=True)
class StreamedTransport(DryTransport):
    """A dry transport whose collectives run on a stream of their own."""

    streams: RecordedStreams
    stream: RecordedStream

    def request(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _StreamedWork:
        self.stream.worker.wait_for(self.streams.host.clock)
        self.stream.wait_stream(self.streams.current())
        self.streams.access(self.stream.worker, name, reads, writes)
        return _StreamedWork(self.stream.record_event(), [*reads, *writes])


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator: the tensors that it receives, reads, writes and makes; `blocks` is True if the host
    waits for its copies."""

    name: str
    inputs: list[Tensor]
    reads: list[Tensor]
    writes: list[Tensor]
    results: list[Tensor]
    blocks: bool

    @classmethod
    def of(cls, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> "OperatorCall":
        """The call of an operator, from its schema, which marks the arguments that are written."""
        name = schema.name.removeprefix("aten::")
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        inputs: list[Tensor] = []
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument in schema.arguments:
            # Constants of the host, which nothing changes, are real tensors, and left out.
            tensors = [x for x in tree_leaves(values.get(argument.name)) if isinstance(x, Tensor) and x.is_meta]
            inputs += tensors
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            writes += tensors if is_written else []
            if is_written:
                reads += [] if argument.name == "out" or name in _OVERWRITE else tensors
            else:
                reads += [] if name.startswith(_SHAPES_ALONE) else tensors
        input_storages = {id(x.untyped_storage()) for x in inputs}
        results = [
            x
            for x in tree_leaves(result)
            if isinstance(x, Tensor) and x.is_meta and id(x.untyped_storage()) not in input_storages
        ]
        return cls(name, inputs, reads, writes, results, blocks=not values.get("non_blocking", False))


class OperatorAccesses(TorchDispatchMode):
    """Records the reads, writes and results of each operator."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams, self._results = streams, MetaResults()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._results.call(operator, args, kwargs)
        schema = operator._schema
        if not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns):
            return result  # a view: nothing is read
        self._streams.ran(OperatorCall.of(schema, args, kwargs, result))
        return result


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """The range of bytes of its memory in which a tensor lies; empty for an empty tensor."""
    if not x.numel():
        return 0, 0
    last_offset: int = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first_element, size = int(x.storage_offset()), x.element_size()
    return first_element * size, (first_element + last_offset + 1) * size
