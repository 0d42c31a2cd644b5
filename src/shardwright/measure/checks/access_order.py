"""Accesses to memory by the host and by streams of a device, and the order between them.

Each worker (the host or a stream) has an order of its own. Work that it has waited for comes before all of its later
work: vector clocks record this (Lamport 1978; FastTrack, Flanagan and Freund 2009, section 2). Two accesses to the same
bytes, at least one of them a write, without an order are a fault. Memory that is freed and handed out again while a
stream may still access it is a fault, too (the rules of torch's CUDACachingAllocator: a freed block returns at once to
the stream that made it, unless it was lent to other streams).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.config.phrase import say

Clock = dict[int, int]  # by number of the worker: how much of its work comes before


@dataclass
class Worker:
    """The host, or a stream: `clock` has all work that comes before its next work."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def wait_for(self, clock: Clock) -> None:
        """Order all work of `clock` before the next work."""
        for number, count in clock.items():
            if count > self.clock.get(number, 0):
                self.clock[number] = count

    def has_waited_for(self, clock: Clock) -> bool:
        """True if all work of `clock` comes before the next work."""
        return all(count <= self.clock.get(number, 0) for number, count in clock.items())

    def works(self) -> int:
        """Do a piece of work; returns its count."""
        count = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = count
        return count

    def comes_after(self, access: "Access") -> bool:
        """True if an access comes before all later work of this worker."""
        return self.clock.get(access.worker.number, 0) >= access.count


@dataclass(frozen=True)
class Access:
    """A read or a write of bytes [low, high) of a block, the `count`-th work of a worker. `what` is the operator, and
    the line that called it."""

    worker: Worker
    count: int
    low: int
    high: int
    is_write: bool
    what: str

    def meets(self, low: int, high: int) -> bool:
        """True if the access includes some of these bytes."""
        return self.low < high and low < self.high

    def __str__(self) -> str:
        if self.is_write:
            return say("write by {worker} ({work})", worker=self.worker.name, work=self.what)
        return say("read by {worker} ({work})", worker=self.worker.name, work=self.what)


@dataclass
class MemoryBlock:
    """A piece of memory that was handed out: on the device to a `stream`, on the host to none."""

    num_bytes: int
    made: str
    stream: Worker | None
    is_safe: bool = False  # True if its allocator guarantees that no copy is under way when it is freed
    lent: dict[int, Worker] = field(default_factory=dict)  # streams that it was lent to, by number
    accesses: list[Access] = field(default_factory=list)

    def access(self, access: Access) -> Iterator[str]:
        """Note an access. Yields a fault for each overlapping access without an order between the two."""
        worker = access.worker
        remaining = []
        for earlier in self.accesses:
            is_met = earlier.meets(access.low, access.high)
            is_before = earlier.worker is worker or worker.comes_after(earlier)
            if is_met and not is_before and (earlier.is_write or access.is_write):
                yield say(
                    "nothing orders a {earlier} and a {access}, of memory made by {made}",
                    earlier=str(earlier),
                    access=str(access),
                    made=self.made,
                )
            is_covered = access.low <= earlier.low and earlier.high <= access.high
            # A worker ordered after the new access is ordered after the earlier one too, which may be forgotten.
            if not (
                is_covered and is_before and (access.is_write or (earlier.worker is worker and not earlier.is_write))
            ):
                remaining.append(earlier)
        self.accesses = [*remaining, access]

    def open_accesses(self) -> list[Access]:
        """Accesses that may still be under way when the block is freed, as far as torch knows. torch waits for the
        streams that the block was lent to, and so for the work that these have waited for."""
        if self.is_safe:
            return []
        own_number = -1 if self.stream is None else self.stream.number
        foreign = [access for access in self.accesses if access.worker.number != own_number]
        return [
            access
            for access in foreign
            if not any(access.worker is borrower or borrower.comes_after(access) for borrower in self.lent.values())
        ]


class FreedMemory:
    """Blocks that were freed, and are handed out again: blocks of the device to the stream that made them, blocks of
    the host to any request for as many bytes."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[tuple[MemoryBlock, list[Access]]]] = {}

    def let_go(self, block: MemoryBlock) -> None:
        """Note that a block is freed."""
        if pending := block.open_accesses():
            self._free.setdefault(self._place(block), []).append((block, pending))

    def handed_out(self, block: MemoryBlock, worker: Worker) -> Iterator[str]:
        """Give memory to a worker. Yields a fault for each block with an access that may still be under way."""
        for freed, pending in self._free.pop(self._place(block), []):
            late = [access for access in pending if not worker.comes_after(access)]
            if late:
                yield say(
                    "memory made by {made} was let go, and {worker} is given it again ({again}), though nothing orders "
                    "that and a {access}",
                    made=freed.made,
                    worker=worker.name,
                    again=block.made,
                    access=str(late[0]),
                )

    @staticmethod
    def _place(block: MemoryBlock) -> tuple[int, int]:
        """The key of blocks that may be handed out for each other."""
        return (-1, block.num_bytes) if block.stream is None else (block.stream.number, 0)
