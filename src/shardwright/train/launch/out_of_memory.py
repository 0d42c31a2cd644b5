"""When an allocation fails: what was asked for, what was held, and how much there was to begin with."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.config.units import memory_text
from shardwright.sharding.memory_account import RankMemory

# What torch says on a CPU, what it says on CUDA, and what numpy says.
_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB|PiB|EiB)\b")
_UNITS = {"bytes": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50, "EiB": 60}
_SIGNS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


class OutOfMemoryError(RuntimeError):
    """An allocation failed. `held` is what the rank had by kind, None before it had its state."""

    def __init__(self, error: BaseException, held: RankMemory | None) -> None:
        self.held = held
        asked = asked_bytes(error)
        text = "ran out of memory" + (f" when it asked for {memory_text(asked)}" if asked is not None else "")
        if held is not None:
            text += f"; besides activations it held {held}"
        else:
            text += ", before its parameters and optimizer state were made"
        super().__init__(text)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed, on host or device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """The bytes of the failed allocation, if the message names them."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * 2 ** _UNITS[found[2]]) if found else None


@contextmanager
def telling_what_is_held(account: Callable[[], RankMemory]) -> Iterator[None]:
    """While this lasts, an allocation that fails raises OutOfMemoryError with the account."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(error, account()) from error


def room_bytes(device: torch.device, num_sharing: int) -> int:
    """Memory that this process may still take: free on its device; or on a CPU what is free on the machine for one of
    `num_sharing` ranks, or in its address space if that is limited to less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = _first_number("/proc/self/statm", "")
        found.append(limit - pages * resource.getpagesize())
    if free_bytes := available_bytes():
        found.append(free_bytes // num_sharing)
    return max(0, min(found)) if found else 0


def available_bytes() -> int:
    """Memory that is free on this machine; 0 where the system does not say it."""
    return _first_number("/proc/meminfo", "MemAvailable:") * 1024


def _first_number(path: str, label: str) -> int:
    """The number after a label in a file of the system; 0 where there is no such file."""
    try:
        text = Path(path).read_text()
    except OSError:
        return 0
    found = re.search(rf"{re.escape(label)}\s*(\d+)", text)
    return int(found[1]) if found else 0
