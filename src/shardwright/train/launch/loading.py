"""The import of torch and of modules that use it, with settings of Python's garbage collector meanwhile: it would find
no garbage, and takes a third of the time of these imports."""

import gc
import tempfile
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


def preload() -> None:
    """Import what the ranks need, in the server that they are forked from, so that each starts in milliseconds."""
    import torch
    import torch.fx.experimental.symbolic_shapes  # the first backward imports it, and it takes half a second

    import shardwright.train.trainer  # noqa: F401

    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    # Python finds the folder for temporary files once, by writing one; a rank that is killed meanwhile would leave it.
    tempfile.gettempdir()
