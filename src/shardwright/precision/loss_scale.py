"""Loss scaling for fp16: the loss, and so every gradient, is multiplied by a scale, so that small gradients fit in
fp16.

Micikevicius et al. 2018 (arXiv 1710.03740, section 3.2): gradients are divided by the scale before the weights are
updated, and a step whose gradients are not finite is skipped. The scale adapts as in PyTorch's GradScaler and NVIDIA's
Apex: it begins too high, is halved at each overflow, and doubled after many good steps.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config.phrase import say

FLOOR = 1.0
CEILING = 2.0**24


_ADAPTED = say(
    "If the loss itself is finite, activations or gradients leave the range of fp16 (65504) at any scale: use "
    'precision.compute = "bf16"; else look for a too high learning rate or broken data'
)
_CONSTANT = say(
    "It is constant: use a smaller precision.loss_scale, or let it adapt with precision.loss_scale_growth_steps = 2000"
)


class LossScale:
    """The scale of the loss, which follows the overflows of gradients.

    All ranks must call `update` with the same flag: True if any rank saw a gradient that is not finite. With
    `growth_steps` 0 the scale is constant, and overflows only skip steps.
    """

    def __init__(self, initial: float = 2.0**16, growth_steps: int = 2000, most_skips_in_a_row: int = 50) -> None:
        """ValueError if a number is out of its range: 0 < initial < infinity, growth_steps >= 0, most skips >= 1."""
        if not 0.0 < initial < float("inf"):
            raise ValueError(
                say("a loss scale of {initial} scales nothing; use a positive number such as 65536", initial=initial)
            )
        if growth_steps < 0:
            raise ValueError(
                say("the loss scale can't grow after {steps} steps; use 0 for a constant one", steps=growth_steps)
            )
        if most_skips_in_a_row < 1:
            raise ValueError(
                say("{count} skipped steps in a row are always had; allow at least 1", count=most_skips_in_a_row)
            )
        self._initial = initial
        self.value = initial  # multiplies the loss of the next step, and divides its gradients
        self._growth_steps = growth_steps
        self._most_skips_in_a_row = most_skips_in_a_row
        self._num_good_in_a_row = 0
        self._num_skipped_in_a_row = 0
        self.num_skipped = 0  # steps skipped so far

    @property
    def can_fall(self) -> bool:
        """True if the scale may have caused an overflow: it is above the smallest scale, and not constant."""
        return bool(self._growth_steps) and self.value > FLOOR

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step. If the step overflowed, the caller does not update the weights.

        FloatingPointError if too many steps in a row overflowed: then the scale is not the reason.
        """
        if overflowed:
            self._skip()
            return
        self._num_skipped_in_a_row = 0
        self._num_good_in_a_row += 1
        if self._num_good_in_a_row == self._growth_steps:
            self._num_good_in_a_row = 0
            # Growth never lowers it: an initial scale above the ceiling stays as it is.
            self.value = max(self.value, min(2.0 * self.value, CEILING))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "value": self.value,
            "num_good_in_a_row": self._num_good_in_a_row,
            "num_skipped_in_a_row": self._num_skipped_in_a_row,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. A constant scale keeps its own value."""
        if self._growth_steps:
            self.value = float(state["value"])
        self._num_good_in_a_row = int(state["num_good_in_a_row"])
        self._num_skipped_in_a_row = int(state["num_skipped_in_a_row"])
        self.num_skipped = int(state["num_skipped"])

    def _skip(self) -> None:
        self._num_good_in_a_row = 0
        self.num_skipped += 1
        self._num_skipped_in_a_row += 1
        if self._growth_steps:
            # An overflow never raises it: an initial scale below the floor stays as it is.
            self.value = min(self.value, max(0.5 * self.value, FLOOR))
        if self._num_skipped_in_a_row >= self._most_skips_in_a_row:
            raise FloatingPointError(
                say(
                    "{count} steps in a row had gradients that are not finite, and none of them changed the weights; "
                    "the loss scale began at {initial:g} and is {value:g}. {way_out}",
                    count=self._num_skipped_in_a_row,
                    initial=self._initial,
                    value=self.value,
                    way_out=_ADAPTED if self._growth_steps else _CONSTANT,
                )
            )
