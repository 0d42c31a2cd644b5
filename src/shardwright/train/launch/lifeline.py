"""Ends a child process with its parent, however the parent ends.

Linux sends the child a signal at its parent's end, also if the child is stopped or stuck. On other systems a child must
check itself.
"""

import ctypes
import os
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def follow(parent: int, number: int) -> bool:
    """Let the system send this process signal `number` when `parent` ends. False if it has ended already.

    Linux counts the end of the thread that started this process as the parent's end.
    """
    ask_for(number)()
    return os.getppid() == parent


def ask_for(number: int) -> Callable[[], None]:
    """A function that lets the system send signal `number` at the parent's end. A child calls it before its program
    begins."""
    if sys.platform != "linux":
        return lambda: None
    ask = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: ask(_PR_SET_PDEATHSIG, number, 0, 0, 0)
