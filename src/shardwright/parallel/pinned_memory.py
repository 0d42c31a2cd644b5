"""Host memory that a device copies from and to by itself, as many bytes as are asked for.

torch's own pinned memory comes in powers of two: up to twice what a state takes, for as long as it is there. Its
setting that leaves sizes as they are (pinned_max_round_threshold_mb) is no way out: what is given back is handed out
again for any size up to the next power of two (CachingHostAllocator.h, get_free_block). So pages are mapped here, and
CUDA is told of them. That takes a while, so those that are given back wait for who asks for as many bytes again, as
each save does.
"""

import mmap
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable
_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
_lock = threading.RLock()  # a collector of cycles may give back while a list is made


@dataclass
class HostBuffer:
    """Host memory that is used again and again, and when the last copy out of it is over."""

    tensor: Tensor
    is_free: Any = None  # an event of the device's streams


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in such memory, with whatever lies there."""
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
    """Pages of their own that CUDA knows."""
    memory = mmap.mmap(-1, num_bytes)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if status != 0:
        raise MemoryError(f"{num_bytes} bytes of host memory could not be pinned (CUDA status {status})")
    return memory


def _give_back(num_bytes: int, memory: mmap.mmap) -> None:
    with _lock:
        _free[num_bytes].append(memory)
