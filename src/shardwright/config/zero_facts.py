"""The facts of ZeRO in a generation of software: where shards and gradients are, and the buffers beside them."""

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec

Launches = Annotated[float, Field(ge=0, le=largest.BYTES_BY_ELEMENT)]
Elements = Annotated[float, Field(ge=0, le=largest.BUFFERED_ELEMENTS)]


class ZeroFactsSpec(Spec):
    """The shards of ZeRO in software, and what it holds beside them."""

    copies_shards: bool = Field(
        False,
        description="A shard of ZeRO-3 in 16 bits has a copy in float32, which is updated; if not, the shard is that "
        "copy, and is cast where it is gathered.",
    )
    hosts_gradients: bool = Field(
        False, description="Where the optimizer is in host memory, gradients are added up there; if not, on the device."
    )
    buffered: tuple[Elements, Elements] = Field(
        (0.0, 0.0),
        description="Elements of the buffers in which gradients wait to be reduced under ZeRO-1 and 2, and under "
        "ZeRO-3: as many for a small model as for a large one.",
    )
    gathered: Elements = Field(
        0.0,
        description="Elements of parameters that ZeRO-3 has gathered at most: it fetches ahead as far, and does not "
        "release what is used again within as many; 0 is two layers and the tables.",
    )
    scattered_bytes: Literal[0, 2, 4] = Field(
        0, description="Bytes of a gradient on its way under ZeRO-3; 0 is as many as under the other stages."
    )
    whole_gradients: bool = Field(
        False,
        description="Gradients of microbatches before the last one add up whole on each rank, as they travel, and are "
        "scattered with the last one's; if not, those of each microbatch are.",
    )
    whole_in_pipeline: bool = Field(
        False,
        description="In a pipeline a rank keeps the parameters that it gathered, and gradients as they travel, whole "
        "until a step's last backward, beside its shards, and so copies of experts that it does not share; if not, as "
        "without one.",
    )
    gathers_beside: bool = Field(
        False,
        description="Under ZeRO-2 a rank has its share of the parameters, as they are updated, beside the whole ones "
        "that it gathered, as products take them.",
    )
    whole_experts: bool = Field(
        False,
        description="Experts are not sharded: each rank that holds some has all of their parameters, gradients and "
        "state, and gradients are summed over those that hold the same.",
    )
    gathers_wide: bool = Field(
        False, description="Parameters are gathered in float32 under ZeRO-3, and cast where products read them."
    )
    copied: tuple[Launches, Launches] = Field(
        (0.0, 0.0),
        description="Bytes by element that kernels between those of a layer move under ZeRO-3: where what was gathered "
        "is laid out as parameters, here of 16 bits, and where gradients are laid out to be scattered.",
    )
    hooks: Launches = Field(
        0.0,
        description="What the host does around a layer's modules under ZeRO-3 in each pass, in launches of a kernel.",
    )
    expert_hooks: Launches = Field(0.0, description="The same for each expert that a rank holds.")
    early_overlap: bool = Field(
        True,
        description="Gradients that ZeRO-2 reduces before the last microbatch are reduced while others compute; if "
        "not, computation waits for them.",
    )
