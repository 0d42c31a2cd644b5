"""Explains a failed allocation: the bytes requested, the memory held by kind, and the free memory at the beginning."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.config.phrase import say
from shardwright.config.units import memory_text
from shardwright.sharding.memory_account import RankMemory

# The messages of torch on a CPU and on CUDA, and of numpy.
_REQUEST = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB|PiB|EiB)\b")
_UNITS = {"bytes": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50, "EiB": 60}
_SIGNS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


class OutOfMemoryError(RuntimeError):
    """An allocation failed. `account` is the rank's memory by kind, or None before its state was made."""

    def __init__(self, error: BaseException, account: RankMemory | None) -> None:
        self.account = account
        request = asked_bytes(error)
        text = say("ran out of memory")
        if request is not None:
            text = say("ran out of memory when it asked for {request}", request=memory_text(request))
        if account is None:
            super().__init__(say("{fault}, before its parameters and optimizer state were made", fault=text))
        else:
            super().__init__(say("{fault}; besides activations it held {account}", fault=text, account=str(account)))


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed, on host or device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """The bytes of the failed allocation; None if the message does not name them."""
    match = _REQUEST.search(str(error))
    return int(float(match[1]) * 2 ** _UNITS[match[2]]) if match else None


@contextmanager
def telling_what_is_held(account: Callable[[], RankMemory]) -> Iterator[None]:
    """During the block, a failed allocation raises OutOfMemoryError with the account."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(error, account()) from error


def room_bytes(device: torch.device, num_sharing: int) -> int:
    """The memory that this process may still allocate. On CUDA, the free memory of its device; on a CPU, the share of
    one of `num_sharing` ranks in the machine's free memory, or the remaining address space if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    bounds = []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = _first_number("/proc/self/statm", "")
        bounds.append(limit - pages * resource.getpagesize())
    if free_bytes := available_bytes():
        bounds.append(free_bytes // num_sharing)
    return max(0, min(bounds)) if bounds else 0


def available_bytes() -> int:
    """The free memory of this machine; 0 if the system does not tell it."""
    return _first_number("/proc/meminfo", "MemAvailable:") * 1024


def machine_bytes() -> int:
    """All memory of this machine, with what it may swap out; 0 if the system does not tell it."""
    return sum(_first_number("/proc/meminfo", label) for label in ("MemTotal:", "SwapTotal:")) * 1024


def _first_number(path: str, label: str) -> int:
    """The first number after a label in a system file; 0 if there is none."""
    try:
        text = Path(path).read_text()
    except OSError:
        return 0
    match = re.search(rf"{re.escape(label)}\s*(\d+)", text)
    return int(match[1]) if match else 0
