"""Blocks that torch's allocator holds for the reduction of gradients and the update, in software with ZeRO.

They are no part of a step's peak, for activations are free by then; but the blocks of activations are too small for
them, so the device has both (memory/allocator_slack.py).
"""

from typing import Annotated

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec

Number = Annotated[float, Field(ge=0, le=largest.BYTES_BY_ELEMENT)]
Elements = Annotated[float, Field(ge=0, le=largest.BUFFERED_ELEMENTS)]


class UpdateBlocksSpec(Spec):
    """Sizes of these blocks."""

    bucket_mib: Annotated[float, Field(ge=0, le=largest.BUCKET_MIB)] = Field(
        0.0, description="MiB of the bucket in which gradients are reduced."
    )
    gradient_bytes: Number = Field(
        0.0, description="By element of all gradients of a rank: their copy in the number type in which they are sent."
    )
    state_bytes: Annotated[tuple[Number, ...], Field(max_length=largest.WORKSPACES)] = Field(
        (),
        description="By element of a rank's optimizer state: each flat copy of its gradients, made when these "
        "themselves are gone under ZeRO-1 and 2.",
    )
    group_elements: Elements = Field(
        0.0,
        description="Elements of a rank's optimizer state of which ZeRO-3 makes these copies at once, beside the "
        "gradients; 0 where it makes none.",
    )
