"""Memory that many units borrow in turn: gathered parameters, gradients on their way, what reductions need.

A buffer that is returned is lent again. Fresh memory of this size would cost the system a page fault for every 4 KiB
on a CPU; and one set of buffers for all layers is what ZeRO-3 saves memory with. What the memory is says its owner: the
runtime's pool has tensors, and that of a prediction nothing but sizes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Memory = TypeVar("Memory")

_MOST_SPARE = 1.25  # a buffer is at most so many times as large as what it is lent for


@dataclass(frozen=True, eq=False)
class Loan(Generic[Memory]):
    """A buffer that is lent: memory of `num_bytes`, which may be more than was asked for."""

    num_bytes: int
    memory: Memory


class BufferPool(Generic[Memory]):
    """Lends buffers. The smallest that is large enough, and not much too large, is taken; where there is none a new one
    is made. Then free ones go, the largest first, before there is more memory than ever: so the most that is held is
    little more than the most that is lent.

    `held_bytes` is the memory of all buffers, lent and free, and `peak_bytes` the most that it ever was.
    """

    def __init__(self, make: Callable[[int], Memory], returned: Callable[[Memory], None] | None = None) -> None:
        """`make` makes memory of so many bytes, and `returned` is told of what was lent and comes back."""
        self._make, self._returned = make, returned
        self._free: list[Loan[Memory]] = []  # smallest first
        self._lock = threading.Lock()  # two passes side by side have a thread each
        self.held_bytes = 0
        self.peak_bytes = 0

    def borrow(self, num_bytes: int) -> Loan[Memory]:
        """A buffer of at least so many bytes, whose values are whatever was there."""
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
        """Count so many more bytes, or fewer, that are held elsewhere, for as long as what is lent here."""
        with self._lock:
            self.held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give_back(self, buffer: Loan[Memory]) -> None:
        """Return what was lent. Nobody may look at it any more."""
        if self._returned is not None:
            self._returned(buffer.memory)
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda free: free.num_bytes)


class OneBuffer(BufferPool[Memory]):
    """A pool of a single buffer, which has memory only while it is lent, and is the same one each time. What it holds
    is counted by another pool."""

    def __init__(
        self, make: Callable[[int], Memory], resize: Callable[[Memory, int], None], counting: BufferPool[Memory]
    ) -> None:
        """`resize` gives a buffer memory of so many bytes, or none."""
        super().__init__(make)
        self._resize = resize
        self._counting = counting
        self._loan: Loan[Memory] | None = None

    def borrow(self, num_bytes: int) -> Loan[Memory]:
        """The buffer, whose values are whatever was there."""
        self._counting.count(num_bytes)
        if self._loan is None:
            self._loan = Loan(num_bytes, self._make(num_bytes))
        else:
            self._resize(self._loan.memory, num_bytes)
        return self._loan

    def give_back(self, buffer: Loan[Memory]) -> None:
        """Let its memory go. Views of it stay, and may be looked at once it is lent again."""
        self._resize(buffer.memory, 0)
        self._counting.count(-buffer.num_bytes)
