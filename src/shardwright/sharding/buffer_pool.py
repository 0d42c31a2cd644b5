"""Memory that many units borrow in turn: for gathered parameters, whole gradients and reductions.

A buffer that is returned is lent again. Fresh memory of this size would cost the system a page fault for every 4 KiB on
a CPU; and ZeRO-3 saves memory because all layers share one set of buffers. The owner decides what the memory is: the
runtime's pool has tensors, and a prediction's pool has only sizes.
"""

import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

Memory = TypeVar("Memory")

_num_bytes = attrgetter("num_bytes")
_MOST_SPARE = 1.25  # the largest ratio of a buffer's size to the size that was asked for


@dataclass(frozen=True, eq=False)
class Loan(Generic[Memory]):
    """A buffer that is lent: memory of `num_bytes`, which may be more than was asked for."""

    num_bytes: int
    memory: Memory


class BufferPool(Generic[Memory]):
    """Lends buffers. `borrow` takes the smallest buffer that is large enough and not much too large, or makes a new
    one. Before a new buffer would raise the peak, free ones are dropped, the largest first; so the most memory ever
    held is little more than the most ever lent.

    `held_bytes` is the memory of all buffers, lent and free, and `peak_bytes` the most that it ever was.
    """

    def __init__(self, make: Callable[[int], Memory], returned: Callable[[Memory], None] | None = None) -> None:
        """`make` makes memory of a number of bytes; `returned` is called with lent memory that comes back."""
        self._make, self._returned = make, returned
        self._free: list[Loan[Memory]] = []  # smallest first
        self._lock = threading.Lock()  # two concurrent passes have a thread each
        self.held_bytes = 0
        self.peak_bytes = 0

    @property
    def situation(self) -> tuple[object, ...]:
        """All that decides which buffers are made and dropped from now on."""
        return self.held_bytes, self.peak_bytes, *map(_num_bytes, self._free)

    def borrow(self, num_bytes: int) -> Loan[Memory]:
        """A buffer of at least `num_bytes` bytes, with arbitrary values."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if num_bytes <= buffer.num_bytes <= _MOST_SPARE * num_bytes:
                    return self._free.pop(index)
            while self._free and self.held_bytes + num_bytes > self.peak_bytes:
                self.held_bytes -= self._free.pop().num_bytes
            self.held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            return Loan(num_bytes, self._make(num_bytes))

    def count(self, num_bytes: int) -> None:
        """Add `num_bytes` bytes that another pool holds to this pool's memory; a negative number takes them away."""
        with self._lock:
            self.held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give_back(self, buffer: Loan[Memory]) -> None:
        """Return a lent buffer. Nobody may read it any more."""
        if self._returned is not None:
            self._returned(buffer.memory)
        with self._lock:
            insort(self._free, buffer, key=_num_bytes)


class OneBuffer(BufferPool[Memory]):
    """A pool of a single buffer, the same each time, which has memory only while it is lent. Another pool counts its
    bytes."""

    def __init__(
        self, make: Callable[[int], Memory], resize: Callable[[Memory, int], None], counting: BufferPool[Memory]
    ) -> None:
        """`resize` gives a buffer memory of a number of bytes, or none for 0."""
        super().__init__(make)
        self._resize = resize
        self._counting = counting
        self._loan: Loan[Memory] | None = None

    def borrow(self, num_bytes: int) -> Loan[Memory]:
        """The buffer, with arbitrary values."""
        self._counting.count(num_bytes)
        if self._loan is None:
            self._loan = Loan(num_bytes, self._make(num_bytes))
        else:
            self._resize(self._loan.memory, num_bytes)
        return self._loan

    def give_back(self, buffer: Loan[Memory]) -> None:
        """Free its memory. Views of it stay valid, and may be read when the buffer is lent again."""
        self._resize(buffer.memory, 0)
        self._counting.count(-buffer.num_bytes)
