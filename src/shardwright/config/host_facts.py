"""The facts of optimizer state in host memory in a generation of software: what its update moves there, in how many
threads, and which copies it waits for."""

from typing import Annotated

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec

Number = Annotated[float, Field(ge=0, le=largest.BYTES_BY_ELEMENT)]


class HostFactsSpec(Spec):
    """The update of software in host memory."""

    update: tuple[Number, Number] = Field(
        (0.0, 0.0),
        description="Bytes that AdamW's update of an element moves in host memory, casts too: under ZeRO-1 and 2, and "
        "under ZeRO-3; 0 is as many as on the device.",
    )
    one_thread: bool = Field(
        False,
        description="One thread of each process updates; if not, as many as use its share of the memory's bandwidth.",
    )
    in_turn: bool = Field(
        False,
        description="The update waits for all gradients, and what follows for the update; if not, one unit's copies "
        "pass while another is updated.",
    )
    pinned: bool = Field(
        True,
        description="Copies are of pinned memory; if not, a thread of the host brings each byte to pinned memory and "
        "back.",
    )
    copied: tuple[Number, Number] = Field(
        (0.0, 0.0),
        description="Where the update is in turn, bytes by element that cross the link to the host: once a step, and "
        "for each of several microbatches, whose gradients are added up on the device and kept on the host.",
    )
