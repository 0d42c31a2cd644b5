"""A memory limit for code that reads a stranger's file: beyond it the system refuses memory, and MemoryError is raised.

A header can state any size, and a library that trusts it allocates the memory before it reads the contents.
"""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IS_LINUX = sys.platform == "linux"  # elsewhere a process can't read the size that its limit counts


def virtual_bytes() -> int:
    """The size of this process's memory, as its limit counts it; 0 if the system does not tell it."""
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())) if _IS_LINUX else {}
    return 1024 * int(sizes.get("VmSize", 0))


def limit_memory(most_bytes: int) -> None:
    """Limit the memory of this process to `most_bytes` from now on, or to the system's hard limit if that is lower."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes if hard < 0 else min(most_bytes, hard), hard))


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Limit the memory of this process to its present size and `more_bytes` more, during the block."""
    used, (soft, hard) = virtual_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    if used and (soft < 0 or used + more_bytes < soft):
        limit_memory(used + more_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
