"""The runs of which a generation of software is assumed where nothing says what ran them."""

from typing import Literal

from pydantic import Field

from shardwright.config.base import Spec


class UsualSpec(Spec):
    """The runs of which a generation of software is assumed where nothing says what ran them."""

    devices: tuple[str, ...] = Field((), description="Generations of devices; left out, all.")
    narrow: bool = Field(False, description="Only with products in fp8 and narrower.")
    shards: tuple[Literal["nothing", "state", "parameters"], ...] = Field(
        ("nothing", "state"), description="What of ZeRO their plans may have: none, stage 1 or 2, stage 3."
    )
