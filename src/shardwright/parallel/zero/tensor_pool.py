"""Memory that units borrow, as tensors."""

import torch
from torch import Tensor

from shardwright.sharding.buffer_pool import BufferPool, Loan

TensorPool = BufferPool[Tensor]


def tensor_pool(device: torch.device) -> TensorPool:
    """A pool whose memory is tensors of bytes."""
    return BufferPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device))


def lent(buffer: Loan[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of `size` elements in borrowed memory, whose values are whatever was there."""
    return buffer.memory[: size * dtype.itemsize].view(dtype)
