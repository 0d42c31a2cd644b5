"""A limit of memory around what reads a stranger's file: the system refuses more, and the reader raises MemoryError.

A header can say any size, and a library that believes it takes the memory before it looks at what is there.
"""

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IS_LINUX = sys.platform == "linux"  # where a process is told the size that its limit counts


def virtual_bytes() -> int:
    """The size of this process's memory as its limit counts it; 0 where the system does not say."""
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())) if _IS_LINUX else {}
    return 1024 * int(sizes.get("VmSize", 0))


def limit_memory(most_bytes: int) -> None:
    """So much memory for this process from here on, within what the system lets it have."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes if hard < 0 else min(most_bytes, hard), hard))


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """So much memory beside what the process has now, for what is done in the block."""
    used, (soft, hard) = virtual_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    if used and (soft < 0 or used + more_bytes < soft):
        limit_memory(used + more_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
