"""Elementwise work that is one kernel on CUDA, written by torch's compiler; on a CPU torch's operators compute it in
turn.

A kernel computes in float32 and rounds its results once; operators in turn each round to their number type. Such work
is an operator of its own, so that a dry run sees one launch, as on a device. It writes its results to memory of the
caller's, so that it has nothing to do in a dry run. The compiler takes some seconds at the first call of each operator,
and again for another number type or layout. The first two dims, those of tokens, may have any size; the other sizes are
fixed in a kernel: for the gradient of a gate, a kernel for any width takes an H200 1.7 ms, and one for its width 0.3.
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
    """The operator of a schema, in which outputs are marked "(a!)". A CPU computes `in_turn`, which should use little
    memory; the compiler makes a kernel of `at_once`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, in_turn, "CPU")
    _LIBRARY.impl(name, lambda *args: compute_at_once(at_once, *args), "CUDA")
    _LIBRARY.impl(name, lambda *args: None, "Meta")
    operator: Work = getattr(torch.ops.shardwright, name)
    return operator


def compute_at_once(at_once: Work, *args: Any) -> None:
    """Call the compiled kernel of some work; the same kernel, whether or not torch is in deterministic mode."""
    with in_any_order():
        compiled(at_once)(*args)


@cache
def compiled(at_once: Work, backend: str | Callable[..., Any] = "inductor") -> Work:
    """The compiled form of some work. Beyond `_MOST_LAYOUTS` layouts it runs uncompiled."""
    limit: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        limit = {"recompile_limit": _MOST_LAYOUTS}
    else:  # before torch 2.12 the limit of all compiled functions, which users may have set higher
        config: Any = torch._dynamo.config
        config.recompile_limit = max(_MOST_LAYOUTS, config.recompile_limit)
    compiled_work: Work = torch.compile(_of_fixed_widths(at_once), dynamic=True, backend=backend, **limit)
    return compiled_work


def _of_fixed_widths(at_once: Work) -> Work:
    """The work with tensor sizes fixed for the compiler, except those of the first two dims, and of a matrix's first.
    Else kernels would divide by these sizes for each element, and could not rely on an alignment of 16 bytes."""

    def work(*args: Any) -> None:
        for argument in args:
            if isinstance(argument, torch.Tensor):
                for dim in range(min(2, argument.dim() - 1), argument.dim()):
                    if dim > 0:
                        torch._dynamo.mark_static(argument, dim)
        at_once(*args)

    # The compiler counts layouts by code object, which all functions of one definition share.
    work.__code__ = work.__code__.replace(co_name=at_once.__name__)
    return work
