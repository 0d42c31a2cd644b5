"""The state of a run in a checkpoint besides its tensors: checked before it is resumed.

It is kept as those who remember it wrote it (their `state_dict`), and could be anything in a checkpoint that somebody
made up. Torch is not needed.
"""

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.config import largest
from shardwright.config.base import printable, shortened

_Number = Annotated[int, Field(ge=0, le=2**53)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Remembered(BaseModel):
    """Fields that are read; others, of a later version, are left alone."""

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
    """Why a run can't go on with what is remembered; empty if it can."""
    if not all(isinstance(remembered, dict) for remembered in state.values()):
        return "what the run remembers is no fields"
    try:
        _RunState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"what the run remembers can't be: {shortened(printable(where))} {first['msg']}"
    return ""


def is_finite(value: Any) -> bool:
    """True if there is no number in a JSON value that JSON has no word for."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return False
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return True
