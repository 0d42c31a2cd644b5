"""Elementwise work that is one kernel on CUDA: torch's compiler writes it. On a CPU torch's operators do it in turn.

A kernel computes in float32 and rounds what it writes, once; in turn each operator rounds to the numbers that it has.
Such work is an operator of its own, so that a dry run sees one launch, as there is on a device. Each writes its results
where the caller says, and so a dry run has nothing to do for it. The compiler takes some seconds at the first call of
each, and again for another number type or layout. The first two dims, those of tokens, may have any size; the others
are built in: a kernel for any width takes an H200 1.7 ms for the gradient of a gate, and one for its width 0.3.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch

from shardwright.precision.fixed_order import in_any_order

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_MOST_LAYOUTS = 64
Work = Callable[..., None]  # writes to some of its arguments


def fused_operator(schema: str, in_turn: Work, at_once: Work) -> Work:
    """The operator of a schema, in which what is written is marked "(a!)". A CPU computes `in_turn`, which may use
    little memory; `at_once` is what the compiler makes a kernel of."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, in_turn, "CPU")
    _LIBRARY.impl(name, lambda *args: compute_at_once(at_once, *args), "CUDA")
    _LIBRARY.impl(name, lambda *args: None, "Meta")
    found: Work = getattr(torch.ops.shardwright, name)
    return found


def compute_at_once(at_once: Work, *args: Any) -> None:
    """Call the kernel that the compiler makes of some work, the same one whatever order torch is asked for."""
    with in_any_order():
        compiled(at_once)(*args)


@cache
def compiled(at_once: Work, backend: str | Callable[..., Any] = "inductor") -> Work:
    """The compiled form of some work. Beyond so many layouts it is left as it is."""
    limit: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        limit = {"recompile_limit": _MOST_LAYOUTS}
    else:  # before torch 2.12 the limit of all compiled functions, which users may have set higher
        config: Any = torch._dynamo.config
        config.recompile_limit = max(_MOST_LAYOUTS, config.recompile_limit)
    made: Work = torch.compile(_of_fixed_widths(at_once), dynamic=True, backend=backend, **limit)
    return made


def _of_fixed_widths(at_once: Work) -> Work:
    """The work for tensors whose sizes behind the first two dims, and of a matrix behind the first, the compiler knows.
    Else it divides by them for each element, and does not know that elements lie at whole 16 bytes."""

    def work(*args: Any) -> None:
        for given in args:
            if isinstance(given, torch.Tensor):
                for dim in range(min(2, given.dim() - 1), given.dim()):
                    if dim > 0:
                        torch._dynamo.mark_static(given, dim)
        at_once(*args)

    return work
