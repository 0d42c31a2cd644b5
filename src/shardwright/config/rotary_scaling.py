"""Rotary positions for longer sequences than those on which a model was trained before: slower rotation of its pairs.

linear: all pairs by `factor` (Chen et al. 2023, arXiv 2306.15595). yarn: pairs that turn slowly, with a ramp to pairs
that turn fast (Peng et al. 2023, arXiv 2309.00071). llama3: as yarn, with a ramp in the number of turns (as released
with Llama 3.1). longrope: each pair by its own factor (Ding et al. 2024, arXiv 2402.13753).
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.field_types import Divisor, PositiveOr0, Tokens
from shardwright.config.phrase import say

_TURNS = {"yarn": 32.0, "llama3": 4.0}  # number of turns of a pair that stays unchanged
# The fields that each kind reads.
_READS = {
    "none": (),
    "linear": ("factor",),
    "yarn": ("factor", "trained_sequence", "fast", "slow", "truncate", "mscale", "mscale_all_dim", "magnitude"),
    "llama3": ("factor", "trained_sequence", "fast", "slow"),
    "longrope": ("factor", "trained_sequence", "short_factors", "long_factors", "magnitude"),
}
_Factors = Annotated[list[Divisor], Field(max_length=largest.WIDTH)]


class RotaryScalingSpec(Spec):
    """The factors by which each pair of elements turns slower, and the factor of all scores."""

    kind: Literal["none", "linear", "yarn", "llama3", "longrope"] = Field(
        "none",
        description="What is stretched: nothing; all pairs alike; those that turn slowly, with a ramp by the number of "
        "the pair (yarn) or by its turns (llama3); or each pair by a factor of its own (longrope).",
    )
    factor: Annotated[float, Field(ge=1, le=largest.SEQUENCE)] = Field(
        1.0, description="How many times longer sequences become; 1 means no scaling."
    )
    trained_sequence: Tokens = Field(4096, description="Sequence that the model was trained on before, in tokens.")
    fast: PositiveOr0 = Field(
        0.0,
        description="Pairs that turn more often than this in trained_sequence stay as they are; 0 means 32 for yarn "
        "and 4 for llama3. Equal to slow, there is a step in place of a ramp.",
    )
    slow: Divisor = Field(
        1.0, description="Pairs that turn less often than this in trained_sequence are stretched by all of factor."
    )
    truncate: bool = Field(True, description="The ramp of yarn begins and ends at whole numbers of pairs.")
    mscale: PositiveOr0 = Field(
        1.0, description="yarn multiplies cosines and sines by 0.1 x mscale x ln(factor) + 1, over the next's."
    )
    mscale_all_dim: PositiveOr0 = Field(
        0.0,
        description="yarn multiplies all scores by the square of 0.1 x mscale_all_dim x ln(factor) + 1, turned or not: "
        "1 in DeepSeek-V3.",
    )
    short_factors: _Factors = Field(
        [], description="longrope: factor of each pair where model.sequence is at most trained_sequence."
    )
    long_factors: _Factors = Field([], description="longrope: factor of each pair where model.sequence is longer.")
    magnitude: PositiveOr0 = Field(
        0.0,
        description="What cosines and sines are multiplied with; 0 means by the formula of yarn, or for longrope "
        "sqrt(1 + ln(factor) / ln(trained_sequence)).",
    )

    @property
    def turns_that_stay(self) -> float:
        """The field `fast` with its default filled in."""
        return self.fast or _TURNS[self.kind]

    @property
    def turned_magnitude(self) -> float:
        """The factor of cosines and sines."""
        if self.magnitude:
            return self.magnitude
        if self.kind == "yarn":
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(max(2, self.trained_sequence)))
        return 1.0

    @property
    def temperature(self) -> float:
        """The factor of all scores.

        The paper of YaRN puts its root into the cosines and sines, so it reaches only the rotary elements of a head.
        DeepSeek's released code puts it into the scores, for heads that are rotary in part.
        """
        return self._grown(self.mscale_all_dim) ** 2 if self.kind == "yarn" else 1.0

    def _grown(self, share: float) -> float:
        return 0.1 * share * math.log(self.factor) + 1

    def pair_factors(self, sequence: int) -> list[float]:
        """The factor of each pair, for longrope."""
        return self.long_factors if sequence > self.trained_sequence else self.short_factors

    def faults(self, num_pairs: int) -> list[str]:
        """Contradictions among the fields of the section, for heads with `num_pairs` rotary pairs."""
        faults: list[str] = [
            say(
                'model.rotary_scaling.{name} is not for kind = "{kind}"; leave it out{other_way}',
                name=name,
                kind=self.kind,
                other_way=say(', or set kind = "yarn"') if self.kind == "none" else "",
            )
            for name, field in RotaryScalingSpec.model_fields.items()
            if name != "kind" and name not in _READS[self.kind] and getattr(self, name) != field.default
        ]
        if self.kind in _TURNS and self.slow > self.turns_that_stay:
            faults.append(
                say(
                    "model.rotary_scaling: between pairs that turn {slow:g} (slow) and {turns_that_stay:g} (fast) "
                    "times is a ramp; use a fast that is not less than slow",
                    slow=self.slow,
                    turns_that_stay=self.turns_that_stay,
                )
            )
        if self.kind == "longrope":
            faults += [
                say(
                    "model.rotary_scaling.{name} has {count} numbers, and {num_pairs} pairs of a head are turned; "
                    "give one for each",
                    name=name,
                    count=len(getattr(self, name)),
                    num_pairs=num_pairs,
                )
                for name in ("short_factors", "long_factors")
                if len(getattr(self, name)) != num_pairs
            ]
        return faults
