"""Precision: the number types in which a step is computed, added up and sent."""

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import SectionSpec
from shardwright.config.field_types import StepsOr0
from shardwright.config.float8_facts import FLOAT8_RECIPES, NO_FLOAT8, Float8Facts, Float8Name
from shardwright.config.number_types import NUMBER_TYPES, MomentNumber, WideNumber


class PrecisionSpec(SectionSpec):
    """The number types of a step. The optimizer computes in float32; it updates float32 weights or those of compute."""

    compute: WideNumber = Field(
        "float32", description="Number type of weights and activations in forward and backward."
    )
    gradients: Literal["float32", "compute"] = Field(
        "float32", description="Number type in which gradients add up over microbatches; compute is that of compute."
    )
    master: Literal["float32", "none"] = Field(
        "float32",
        description="Weights that the optimizer updates, if compute has 16 bits: a float32 copy, or none, so that it "
        "rounds the weights of compute after each step; changes of less than half a last place are lost.",
    )
    reduce: Literal["gradients", "float32"] = Field(
        "gradients",
        description="Number type in which gradients travel, if plan.compress says nothing else; gradients is that in "
        "which they add up.",
    )
    moments: MomentNumber = Field(
        "float32",
        description="Number type in which the optimizer's moments are kept from step to step, if it has some for each "
        "element; bf16 halves their memory, and what it changes of them by less than half a last place is lost.",
    )
    loss_scale: Annotated[float, Field(ge=0, le=largest.LOSS_SCALE)] = Field(
        65536.0, description="First factor of the loss with fp16, so that small gradients are kept; 0 means none."
    )
    loss_scale_growth_steps: StepsOr0 = Field(
        2000, description="Steps without overflow after which the loss scale doubles; 0 means that it is constant."
    )
    float8: Float8Name = Field("none", description="Recipe by which the products of linear layers are computed in fp8.")
    float8_weight_gradients: bool = Field(
        False,
        description="Weight gradients of these products are computed in fp8 too, and the layers keep their inputs in "
        "fp8 where nothing else keeps them.",
    )
    float8_dispatch: bool = Field(
        False,
        description="Tokens travel to their experts in fp8 with a scale for each 128 numbers, and so do gradients in "
        "the backward; what comes back is in the numbers of compute.",
    )
    float8_history: Annotated[int, Field(gt=0, le=largest.HISTORY)] = Field(
        16, description="delayed: steps whose largest values the scales are taken from."
    )

    def with_float8(self, recipe: str) -> "PrecisionSpec":
        """A copy with another recipe of fp8; with "none", weight gradients are not in fp8 either."""
        return self.model_copy(
            update={
                "float8": recipe,
                "float8_weight_gradients": self.float8_weight_gradients and recipe != "none",
            }
        )

    @property
    def float8_facts(self) -> Float8Facts | None:
        """The facts of the recipe; None if products are not in fp8."""
        return None if self.float8 == NO_FLOAT8 else FLOAT8_RECIPES[self.float8]

    @property
    def has_delayed_scales(self) -> bool:
        """True if scales of fp8 are taken from past steps."""
        return self.float8_facts is not None and self.float8_facts.delayed

    @property
    def product_number(self) -> str:
        """Number type of the products of linear layers: fp8 or that of compute. MFU is a share of its peak rate."""
        return "fp8" if self.float8 != NO_FLOAT8 else self.compute

    @property
    def gradient_number(self) -> str:
        """Number type in which gradients add up."""
        return self.compute if self.gradients == "compute" else self.gradients

    @property
    def master_number(self) -> str:
        """Number type of the weights that the optimizer updates."""
        return self.compute if self.master == "none" else "float32"

    @property
    def reduce_number(self) -> str:
        """Number type in which gradients travel."""
        return self.gradient_number if self.reduce == "gradients" else self.reduce

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled."""
        return NUMBER_TYPES[self.compute].needs_loss_scale and self.loss_scale > 0

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of a weight or an activation in forward and backward."""
        return NUMBER_TYPES[self.compute].num_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient while it is accumulated."""
        return NUMBER_TYPES[self.gradient_number].num_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes per element of a weight that the optimizer updates."""
        return NUMBER_TYPES[self.master_number].num_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient while it travels."""
        return NUMBER_TYPES[self.reduce_number].num_bytes

    @property
    def moment_bytes(self) -> int:
        """Bytes per element of a moment."""
        return NUMBER_TYPES[self.moments].num_bytes
