"""Delayed scaling: the scale of a tensor follows from its values in past steps, so it is known before the tensor is.

The recipe of NVIDIA's Transformer Engine: amax is the largest absolute value of the last `length` steps, and the tensor
is cast with the scale for this amax, times 2^margin for headroom. All microbatches of a step make one entry.

Two things differ, in situations in which Transformer Engine trains on wrong numbers for a while. Until a value has been
seen there is no scale, and tensors are cast with their own scale; Transformer Engine begins with scale 1, under which a
first gradient of 1e-6 is zero. And a step that was not finite adds an entry of 0, which does not affect the scale.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.config.phrase import say
from shardwright.precision.float8 import scales_for


class AmaxHistory:
    """The amaxes of one tensor over past steps, newest last, and of the step under way."""

    def __init__(self, length: int, margin: int, dtype: torch.dtype) -> None:
        """ValueError if the history has no length."""
        if length < 1:
            raise ValueError(
                say("a history of {length} amaxes has no largest; use a length of at least 1", length=length)
            )
        self._dtype = dtype
        self._margin = margin
        self._past: deque[float] = deque(maxlen=length)
        self._largest = 0.0
        self.now: Tensor | None = None  # amax of the step under way; None if nothing was cast
        self.scale: float | None = None  # for casts in this step; None until a value other than 0 has been seen

    def see(self, amax: Tensor) -> None:
        """Record the amax of a microbatch, float32 []."""
        self.now = amax if self.now is None else torch.maximum(self.now, amax)

    def forget_now(self) -> None:
        """Forget the casts since the last step, which were not for training."""
        self.now = None

    def end_step(self, amax: float) -> None:
        """End the step, with its amax over all ranks."""
        self._past.append(amax if math.isfinite(amax) else 0.0)
        self._set_largest(max(self._past))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, taken between two steps. The same on all ranks that share the tensor."""
        return {"past": list(self._past), "largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. If its history is longer, its newest entries are used."""
        self._past = deque(state["past"], maxlen=self._past.maxlen)
        self._set_largest(max(self._past, default=0.0) or state["largest"])

    def _set_largest(self, amax: float) -> None:
        self.now = None
        if amax > 0.0:  # a history of zeros keeps the scale as it was
            self._largest = amax
            self.scale = float(scales_for(torch.tensor(amax), self._dtype)) * 2.0**self._margin
