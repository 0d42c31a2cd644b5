"""Types of fields: texts, and numbers with their limits (largest.py), named after the things that they count. 0 means
none, or the default."""

import re
from datetime import date
from typing import Annotated

from pydantic import AfterValidator, Field

from shardwright.config import largest
from shardwright.config.device_name import catalog_device
from shardwright.config.phrase import say

Ranks = Annotated[int, Field(gt=0, le=largest.RANKS)]  # also for devices
RanksOr0 = Annotated[int, Field(ge=0, le=largest.RANKS)]
Layers = Annotated[int, Field(gt=0, le=largest.LAYERS)]
LayersOr0 = Annotated[int, Field(ge=0, le=largest.LAYERS)]
WidthOr0 = Annotated[int, Field(ge=0, le=largest.WIDTH)]
Experts = Annotated[int, Field(gt=0, le=largest.EXPERTS)]
ExpertsOr0 = Annotated[int, Field(ge=0, le=largest.EXPERTS)]
Sequences = Annotated[int, Field(gt=0, le=largest.BATCH)]
Tokens = Annotated[int, Field(gt=0, le=largest.SEQUENCE)]  # of a sequence
TokensOr0 = Annotated[int, Field(ge=0, le=largest.SEQUENCE)]
Steps = Annotated[int, Field(gt=0, le=largest.STEPS)]
StepsOr0 = Annotated[int, Field(ge=0, le=largest.STEPS)]
Divisor = Annotated[float, Field(ge=largest.LEAST_FACTOR, le=largest.FACTOR)]  # also for what is added to a divisor
Positive = Annotated[float, Field(gt=0, le=largest.FACTOR)]
PositiveOr0 = Annotated[float, Field(ge=0, le=largest.FACTOR)]
Probability = Annotated[float, Field(ge=0, lt=1)]
ShareOr0 = Annotated[float, Field(ge=0, le=1)]
DeviceName = Annotated[str, AfterValidator(catalog_device)]  # of the catalog entry, however a file spells it: H100


def _day(text: str) -> str:
    try:
        if not text or date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ValueError(say("it should be a date such as 2026-07-26, or empty"))


def _plain_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]+", text):
        return text
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-") or "my-set"
    raise ValueError(say("it may only have letters, digits, '-', '_' and '.'; name it {plain}, say", plain=plain))


PlainName = Annotated[str, Field(min_length=1, max_length=80), AfterValidator(_plain_name)]
DayOrNone = Annotated[str, AfterValidator(_day)]
Month = Annotated[str, Field(pattern=r"^(20\d\d-(0[1-9]|1[0-2]))?$")]  # such as 2023-10; empty if none is known
