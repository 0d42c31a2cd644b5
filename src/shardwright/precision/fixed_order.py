"""Kernels that add in a fixed order, so that two passes over the same numbers give the same bits.

On a CPU all kernels do. On CUDA the backwards of torch's attention kernels and some scatters add with atomics, in any
order. In torch's strict deterministic mode, the backward of flash attention adds its parts in turn, the backward of
efficient attention does not split keys, and cuDNN's attention is not used
(ATen/native/transformers/cuda/attention_backward.cu and sdp_utils.cpp); indexed sums are sorted. With `warn_only` torch
would warn, but change nothing in attention. Some operators have no deterministic form (torch's documentation of
use_deterministic_algorithms lists them: cumulative sums of floating numbers, histograms, weighted counts, pooling and
padding); no model here uses them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACE = ":4096:8"  # torch requires a fixed workspace size; this is its default on Hopper


@contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """A block in which a device computes the same bits each time."""
    if device.type != "cuda":
        yield
        return
    was_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fills, workspace = deterministic.fill_uninitialized_memory, os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, _FIXED_WORKSPACE)
    deterministic.fill_uninitialized_memory = False  # no code reads memory before it writes to it
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
    """A block in which the compiler is not asked for deterministic kernels: it would compile each kernel again for
    that, and kernels of one row or element have a fixed order anyway."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)
