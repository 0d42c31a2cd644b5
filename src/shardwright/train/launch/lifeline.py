"""A process that ends with the one that started it, however that one ended.

Linux tells the child of its parent's end, even a child that is stopped or stuck. Elsewhere a child must look itself.
"""

import ctypes
import os
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def follow(parent: int, number: int) -> bool:
    """Have the system send this process signal `number` when `parent` ends. False if it has ended already.

    Linux takes the end of the thread that started this process for the parent's.
    """
    ask_for(number)()
    return os.getppid() == parent


def ask_for(number: int) -> Callable[[], None]:
    """A function that asks the system for signal `number` at the parent's end, to be called in a child before its
    program."""
    if sys.platform != "linux":
        return lambda: None
    ask = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: ask(_PR_SET_PDEATHSIG, number, 0, 0, 0)
