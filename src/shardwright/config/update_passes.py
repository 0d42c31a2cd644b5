"""Passes over gradients and weights around an optimizer's own kernel, and the bytes that each moves.

A kernel that does all at once reads a gradient in float32, moments and master weights, and writes those and a weight in
16 bits, and the norm reads gradients once more: that is a software's `update`. Software with more kernels has passes.
"""

from collections.abc import Iterable
from typing import Literal

UpdatePass = Literal["cast", "unscale", "clip", "weights", "foreach"]
GradientPass = Literal["zero", "average", "pack"]

_FLOAT32, _HALF = 4, 2


def update_pass_bytes(passes: Iterable[UpdatePass], gradient_bytes: int, is_scaled: bool) -> int:
    """Bytes that passes of an update move, by element that a rank updates. `is_scaled`: losses are scaled, as in fp16.

    - `cast` makes float32 of gradients in 16 bits.
    - `unscale` divides gradients by the loss scale, and looks for infinities; nothing is scaled in other numbers.
    - `clip` multiplies gradients by what their norm allows.
    - `weights` reads the updated master weights again, to write those in 16 bits.
    - `foreach` is Adam by an operator after the other over all tensors (torch's _multi_tensor_adamw): decay 8, the
      first moment 12, the second 8 and 12, its root 8, that over its bias 8, plus epsilon 8, and the step 16, where one
      kernel moves 28.
    """
    moved = {
        "cast": _HALF + _FLOAT32 if gradient_bytes == _HALF else 0,
        "unscale": 2 * _FLOAT32 if is_scaled else 0,
        "clip": 2 * _FLOAT32,
        "weights": _FLOAT32,
        "foreach": 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 - 28,
    }
    return sum(moved[name] for name in passes)


def gradient_pass_bytes(passes: Iterable[GradientPass], gradient_bytes: int) -> int:
    """Bytes that passes over all gradients of a rank move once a step, by element.

    - `zero` empties the buffer in which they add up.
    - `average` divides them by the number of replicas.
    - `pack` joins gradients in 16 bits, which have tensors of their own, for one reduction, and copies the sums back;
      gradients in float32 add up in one buffer.
    """
    moved = {
        "zero": gradient_bytes,
        "average": 2 * gradient_bytes,
        "pack": 4 * gradient_bytes if gradient_bytes == _HALF else gradient_bytes,
    }
    return sum(moved[name] for name in passes)
