"""Memory that many units borrow in turn: gathered parameters, gradients on their way, what collectives need.

A buffer that is returned is lent again. Fresh memory of this size would cost the system a page fault for every 4 KiB
on a CPU; and one set of buffers for all layers is what ZeRO-3 saves memory with.
"""

import threading

import torch
from torch import Tensor


class BufferPool:
    """Lends flat buffers. The smallest that is large enough is taken, and a new one is made where there is none.

    `peak_bytes` is the most memory that all buffers, lent and free, ever had.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # of bytes
        self._lent: dict[int, Tensor] = {}  # by address
        self._lock = threading.Lock()
        self.peak_bytes = 0

    def borrow(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of `size` elements, whose values are whatever was there."""
        num_bytes = size * dtype.itemsize
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
            if fitting:
                memory = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not memory]
            else:
                # A free one that is too small is dropped, so that there are never more than were needed at once.
                self._free = sorted(self._free, key=Tensor.numel)[1:]
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._lent[memory.data_ptr()] = memory
            self.peak_bytes = max(self.peak_bytes, self._held_bytes())
        return memory[:num_bytes].view(dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Return what was lent. Nobody may look at it any more."""
        with self._lock:
            self._free.append(self._lent.pop(buffer.data_ptr()))

    def _held_bytes(self) -> int:
        return sum(map(Tensor.numel, (*self._free, *self._lent.values())))
