"""Memory that units borrow, as tensors."""

import torch
from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams
from shardwright.sharding.buffer_pool import BufferPool, Loan

TensorPool = BufferPool[Tensor]


def tensor_pool(device: torch.device, streams: DeviceStreams | None = None) -> TensorPool:
    """A pool whose memory is tensors of bytes. A buffer may be made on one of the device's `streams` and returned on
    another: if the pool then frees it, its memory is not reused before the last of these streams is done with it."""

    def returned(memory: Tensor) -> None:
        if streams is not None:
            streams.lend(memory, streams.current())

    return BufferPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device), returned)


def lent(buffer: Loan[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """A flat, uninitialised tensor of `size` elements in borrowed memory."""
    return buffer.memory[: size * dtype.itemsize].view(dtype)
