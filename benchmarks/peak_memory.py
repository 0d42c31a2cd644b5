"""The most memory that a process ever held, from the kernel's own count.

VmHWM is the highest resident set since the process began or since a 5 was written to clear_refs (proc(5)). It counts
what malloc keeps for reuse too, for the machine must have that as well. Allocator settings are left as they are.
"""

from pathlib import Path

MIB = 2**20


def reset_peak() -> None:
    """Begin to count anew, from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """The memory that is resident now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory is measured on Linux alone")
