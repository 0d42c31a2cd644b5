"""Scores that grow with the position of a query, in layers without rotary positions: Llama 4, after Nakanishi 2025
(arXiv 2501.19399)."""

from pydantic import Field

from shardwright.config.base import Spec
from shardwright.config.field_types import PositiveOr0, Tokens


class TemperatureSpec(Spec):
    """A query at position p is multiplied by 1 + scale x ln(1 + floor((p + 1) / floor))."""

    scale: PositiveOr0 = Field(0.0, description="How much queries grow with their position; 0 means not at all.")
    floor: Tokens = Field(8192, description="Positions after which they grow once more.")
