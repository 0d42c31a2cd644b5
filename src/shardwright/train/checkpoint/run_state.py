"""Checks of the state in a checkpoint that is no tensor, before a run resumes from it.

Each part is the `state_dict` of the object that it belongs to. In a forged checkpoint it may be any JSON. Torch is not
needed.
"""

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.config import largest
from shardwright.config.base import printable, shortened
from shardwright.config.phrase import say

_Number = Annotated[int, Field(ge=0, le=2**53)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Remembered(BaseModel):
    """A stored `state_dict`. Unknown fields, as of a later version, are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _LossScale(_Remembered):
    value: float = Field(gt=0, le=largest.LOSS_SCALE)
    num_good_in_a_row: _Number
    num_skipped_in_a_row: _Number
    num_skipped: _Number


class _Band(_Remembered):
    past: list[_Finite]


class _Judge(_Remembered):
    band: _Band
    num_skips_in_a_row: _Number
    last_bad: Annotated[int, Field(ge=-1, le=2**53)] = -1
    undone: list[_Number]
    counts: dict[str, _Number]


class _Health(_Remembered):
    judge: _Judge


class _Schedule(_Remembered):
    left_out: _Number


class _RunState(_Remembered):
    loss_scale: _LossScale | None = None
    health: _Health | None = None
    schedule: _Schedule | None = None


def state_fault(state: dict[str, Any]) -> str:
    """Why a run can't resume from this state; "" if it can."""
    if not all(isinstance(part, dict) for part in state.values()):
        return say("what the run remembers is no fields")
    try:
        _RunState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return say(
            "what the run remembers can't be: {field} {reason}", field=shortened(printable(field)), reason=first["msg"]
        )
    return ""


def is_finite(value: Any) -> bool:
    """True if all numbers within a JSON value are finite."""
    unchecked = [value]
    while unchecked:
        item = unchecked.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return False
        unchecked += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return True
