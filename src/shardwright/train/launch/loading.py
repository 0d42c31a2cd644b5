"""Settings of Python's garbage collector while torch and modules that use it are imported.

The collector would find no garbage, and takes a third of the time of these imports.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
# New objects between two collections; importing torch makes some hundred thousand.
_RARELY = 50_000


def collect_rarely() -> None:
    """Collect garbage rarely: for a command, which imports modules when it needs them."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Collect garbage as usual, but only objects made from now on: a cycle may hold tensors."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage during the block, and never among the objects that it makes: a collection writes to each
    object, and so would copy memory that a forked process shares."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
