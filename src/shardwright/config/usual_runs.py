"""The runs of which software is assumed where nothing says what ran them, and its settings where nothing says those."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shardwright.config.base import Spec
from shardwright.config.phrase import say
from shardwright.config.software_changes import OVERLAP_WORDS

Graphs = Literal["none", "parts", "step"]  # CUDA graphs: none, of parts of layers, or one of a whole step


def _overlap_word(word: str) -> str:
    if word not in OVERLAP_WORDS:
        raise ValueError(say("{word} names no overlap; use one of {known}", word=repr(word), known=OVERLAP_WORDS))
    return word


class UsualSpec(Spec):
    """The runs of which a generation of software is assumed where nothing says what ran them."""

    devices: tuple[str, ...] = Field((), description="Generations of devices; left out, all.")
    narrow: bool = Field(False, description="Only with products in fp8 and narrower.")
    shards: tuple[Literal["nothing", "state", "parameters"], ...] = Field(
        ("nothing", "state"), description="What of ZeRO their plans may have: none, stage 1 or 2, stage 3."
    )


class UsualSettingsSpec(Spec):
    """Settings of runs of a generation of software where nothing says them."""

    devices: tuple[str, ...] = Field(description="Generations of devices.")
    narrow: bool = Field(False, description="Only with products in fp8 and narrower.")
    graphs: Graphs = Field("none", description="CUDA graphs: of parts of layers, or one of a whole step.")
    overlap: tuple[Annotated[str, AfterValidator(_overlap_word)], ...] = Field(
        (), description="Overlapped axes, and no-AXIS for others, as tables have them."
    )

    def hold(self, device: str, is_narrow: bool) -> bool:
        """True if they are usual on a generation of devices, with products in narrow numbers or not."""
        return device in self.devices and (is_narrow or not self.narrow)
