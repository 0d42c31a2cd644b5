"""Elementwise work that is one kernel on CUDA: torch's compiler writes it. On a CPU torch's operators do it in turn.

Such work is an operator of its own, so that a dry run sees one launch, as there is on a device. Each writes its results
where the caller says, and so a dry run has nothing to do for it. The compiler takes some seconds at the first call of
each; shapes are not built in.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
Work = Callable[..., None]  # writes to some of its arguments


def fused_operator(schema: str, in_turn: Work, at_once: Work) -> Work:
    """The operator of a schema, in which what is written is marked "(a!)". A CPU computes `in_turn`, which may use
    little memory; `at_once` is what the compiler makes a kernel of."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, in_turn, "CPU")
    _LIBRARY.impl(name, lambda *args: _compiled(at_once)(*args), "CUDA")
    _LIBRARY.impl(name, lambda *args: None, "Meta")
    found: Work = getattr(torch.ops.shardwright, name)
    return found


@cache
def _compiled(at_once: Work) -> Any:
    return torch.compile(at_once, fullgraph=True, dynamic=True)
