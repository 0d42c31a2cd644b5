"""Accesses to memory by the host and by streams of a device, and the order that they have.

Each of them works in an order of its own. What one has waited for comes before all that it does from then on: that is
kept as vector clocks (Lamport 1978; FastTrack, Flanagan and Freund 2009, section 2). Two accesses to the same bytes,
one of them a write, that have no order are a fault; and so is memory that is let go and handed out again while a stream
has still to come to it (the rules of torch's CUDACachingAllocator: a block goes back to the stream that it was made on,
at once, but for the streams that it was lent to).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

Clock = dict[int, int]  # of each worker by its number, how much of its work comes before


@dataclass
class Worker:
    """The host, or a stream: `clock` has all that comes before what it does next."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def wait_for(self, clock: Clock) -> None:
        """From now on all of this comes before."""
        for number, count in clock.items():
            if count > self.clock.get(number, 0):
                self.clock[number] = count

    def works(self) -> int:
        """Do a piece of work; its count."""
        count = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = count
        return count

    def comes_after(self, access: "Access") -> bool:
        """True if an access comes before all that this does from now on."""
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
        """True if some of these bytes are accessed."""
        return self.low < high and low < self.high

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} by {self.worker.name} ({self.what})"


@dataclass
class MemoryBlock:
    """A piece of memory that was handed out: on the device to a `stream`, on the host to nobody."""

    num_bytes: int
    made: str
    stream: Worker | None
    is_safe: bool = False  # whether what hands it out sees to it that no copy is under way
    lent: dict[int, Worker] = field(default_factory=dict)  # those that it was lent to, by number
    accesses: list[Access] = field(default_factory=list)

    def access(self, access: Access) -> Iterator[str]:
        """Note an access. Yields a fault for each one without an order that this one meets."""
        mine = access.worker
        kept = []
        for other in self.accesses:
            is_met = other.meets(access.low, access.high)
            is_before = other.worker is mine or mine.comes_after(other)
            if is_met and not is_before and (other.is_write or access.is_write):
                yield f"nothing orders a {other} and a {access}, of memory made by {self.made}"
            is_covered = access.low <= other.low and other.high <= access.high
            # Who comes after this one comes after what is before it too.
            if not (is_covered and is_before and (access.is_write or (other.worker is mine and not other.is_write))):
                kept.append(other)
        self.accesses = [*kept, access]

    def open_accesses(self) -> list[Access]:
        """Accesses to which a stream may still come when the block is let go, for all that torch knows. It waits for
        those that the block was lent to, and so for what these have waited for."""
        if self.is_safe:
            return []
        own = -1 if self.stream is None else self.stream.number
        mine = [one for one in self.accesses if one.worker.number != own]
        return [one for one in mine if not any(one.worker is by or by.comes_after(one) for by in self.lent.values())]


class FreedMemory:
    """Blocks that were let go, and are handed out again: blocks of the device by the stream that they were made on,
    those of the host to who asks for as many bytes."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[tuple[MemoryBlock, list[Access]]]] = {}

    def let_go(self, block: MemoryBlock) -> None:
        """Nobody holds a block any more."""
        if left := block.open_accesses():
            self._free.setdefault(self._place(block), []).append((block, left))

    def handed_out(self, block: MemoryBlock, worker: Worker) -> Iterator[str]:
        """A worker gets memory. Yields a fault for each access that may still be made to what it gets."""
        for other, left in self._free.pop(self._place(block), []):
            late = [access for access in left if not worker.comes_after(access)]
            if late:
                yield (
                    f"memory made by {other.made} was let go, and {worker.name} is given it again ({block.made}), "
                    f"though nothing orders that and a {late[0]}"
                )

    @staticmethod
    def _place(block: MemoryBlock) -> tuple[int, int]:
        """Blocks of one place may be handed out for each other."""
        return (-1, block.num_bytes) if block.stream is None else (block.stream.number, 0)
