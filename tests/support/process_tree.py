"""Processes that a process has started, as Linux lists them."""

from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Process ids of a process's children, in the order of their start; without those of threads that end meanwhile."""
    started: list[int] = []
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                started += map(int, (task / "children").read_text().split())
    return started
