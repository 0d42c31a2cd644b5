"""Kernels that add in one order, so that two passes over the same numbers give the same bits.

On a CPU all do. On CUDA the backwards of torch's attention kernels and some scatters add with atomics, in whatever
order they come. Where torch is to be deterministic, strictly, flash attention's backward takes turns, that of efficient
attention does not split keys, cuDNN's attention is passed by (ATen/native/transformers/cuda/attention_backward.cu and
sdp_utils.cpp), and indexed sums are sorted. With `warn_only` it would warn and change none of the three. None of the
operators that remain without such a form (torch.use_deterministic_algorithms lists them: sums along a dim of floating
numbers, histograms, weighed counts, pooling and padding) is one of a model's here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ONE_OF_EACH_STREAM = ":4096:8"  # torch asks for a workspace of fixed size, and on Hopper this is what it takes anyway


@contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """While this lasts, what is computed on a device is the same each time."""
    if device.type != "cuda":
        yield
        return
    was_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fills, workspace = deterministic.fill_uninitialized_memory, os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, _ONE_OF_EACH_STREAM)
    deterministic.fill_uninitialized_memory = False  # nobody reads what was not written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warns)
        deterministic.fill_uninitialized_memory = fills
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


@contextmanager
def in_any_order() -> Iterator[None]:
    """While this lasts, the compiler is not asked for an order: it would make each of its kernels anew for that, and
    those of one row or element have one anyway."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)
