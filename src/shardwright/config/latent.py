"""The fields of multi-head latent attention. DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""

from pydantic import Field

from shardwright.config.base import Spec
from shardwright.config.field_types import WidthOr0


class LatentSpec(Spec):
    """Keys and values are made from one small vector per token, and queries from another. Widths are of one head.

    A head's query and key are two parts side by side: `nope_dim` elements without position and `rope_dim` elements with
    rotary position. All heads share the rotary part of the key.
    """

    kv_rank: WidthOr0 = Field(
        0, description="Width of the vector that keys and values are made from; 0 means ordinary attention."
    )
    q_rank: WidthOr0 = Field(0, description="Width of the vector that queries are made from; 0 means from the input.")
    nope_dim: WidthOr0 = Field(128, description="Width of a head's query and key without position.")
    rope_dim: WidthOr0 = Field(64, description="Width of a head's query and key with rotary position.")
    value_dim: WidthOr0 = Field(128, description="Width of a head's value.")

    def faults(self) -> list[str]:
        """Contradictions among the fields of the section."""
        if self == LatentSpec():
            return []
        if self.kv_rank == 0:
            return ["model.latent is set, and its kv_rank 0 means ordinary attention; set kv_rank, or leave it out"]
        faults = [
            f"model.latent.{name} is 0, and a head needs some; leave it out for the default, {default}"
            for name, default in (("rope_dim", 64), ("value_dim", 128))
            if getattr(self, name) == 0
        ]
        if self.rope_dim % 2:
            faults.append(
                f"rotary positions turn pairs of elements, and model.latent.rope_dim is {self.rope_dim}; use an even "
                "one"
            )
        if self.value_dim > self.nope_dim + self.rope_dim:
            faults.append(
                f"model.latent.value_dim {self.value_dim} is more than the width of a key, nope_dim {self.nope_dim} + "
                f"rope_dim {self.rope_dim} = {self.nope_dim + self.rope_dim}; use at most that"
            )
        return faults
