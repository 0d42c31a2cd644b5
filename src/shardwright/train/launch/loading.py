"""Loading of torch and all that is built on it without a collector of cycles that goes through it again and again.

It would find nothing, and takes a third of the time of those imports.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
# New objects between two looks; loading torch makes some hundred thousand.
_RARELY = 50_000


def collect_rarely() -> None:
    """Have cycles be looked for rarely: in a command, which loads what it needs where it needs it."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Have cycles be looked for as Python does, among what is made from here on: a cycle may hold tensors."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def loading() -> Iterator[None]:
    """No looks before the end of the block, and none later at what it has loaded: a look writes to each object, and
    so to memory that a forked process shares with others until then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
