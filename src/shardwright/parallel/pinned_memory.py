"""Pinned host memory, which a device can copy from and to asynchronously, of exactly the requested size.

torch's own pinned memory comes in powers of two: up to twice the bytes of a state, for as long as the state exists. Its
setting that keeps sizes as they are (pinned_max_round_threshold_mb) does not help: a returned block is handed out
again for any size up to the next power of two (CachingHostAllocator.h, get_free_block). So pages are mapped here and
registered with CUDA. Registration is slow, so returned memory is kept for the next request of the same size: each save
of a checkpoint makes the same requests.
"""

import mmap
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.config.phrase import say

_PORTABLE = 1  # cudaHostRegisterPortable
_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
_lock = threading.RLock()  # reentrant: the garbage collector may call `_give_back` while a list is changed


@dataclass
class HostBuffer:
    """Reusable host memory, and the event after which its last copy to the device is over."""

    tensor: Tensor
    is_free: Any = None  # an event of the device's streams


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pinned host memory."""
    size = torch.Size(shape).numel()
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    num_bytes = size * dtype.itemsize
    with _lock:
        memory = _free[num_bytes].pop() if _free[num_bytes] else None
    memory = _registered(num_bytes) if memory is None else memory
    view = memoryview(memory)
    weakref.finalize(view, _give_back, num_bytes, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(shape)


def _registered(num_bytes: int) -> mmap.mmap:
    """New pages that are registered with CUDA. MemoryError if CUDA cannot pin them."""
    memory = mmap.mmap(-1, num_bytes)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if status != 0:
        raise MemoryError(
            say(
                "{num_bytes} bytes of host memory could not be pinned (CUDA status {status})",
                num_bytes=num_bytes,
                status=status,
            )
        )
    return memory


def _give_back(num_bytes: int, memory: mmap.mmap) -> None:
    with _lock:
        _free[num_bytes].append(memory)
