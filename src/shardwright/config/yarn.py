"""YaRN: rotary positions for sequences longer than those trained on. Peng et al. 2023 (arXiv 2309.00071)."""

import math
from typing import Annotated

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.field_types import Divisor, Tokens


class YarnSpec(Spec):
    """Pairs that turn slowly are stretched by `factor`, those that turn fast stay, and between is a ramp."""

    factor: Annotated[float, Field(ge=1, le=largest.SEQUENCE)] = Field(
        1.0, description="How many times longer sequences become; 1 means no scaling."
    )
    trained_sequence: Tokens = Field(4096, description="Sequence that the model was trained on before, in tokens.")
    fast: Divisor = Field(
        32.0, description="Pairs that turn more often than this in trained_sequence stay as they are."
    )
    slow: Divisor = Field(
        1.0, description="Pairs that turn less often than this in trained_sequence are stretched by all of factor."
    )

    @property
    def temperature(self) -> float:
        """What scores are multiplied with: (0.1 ln factor + 1)^2 (section 3.4).

        The paper hides its root in the cosines and sines, which only works where a head is rotary throughout.
        DeepSeek's released code puts it here too.
        """
        return (0.1 * math.log(self.factor) + 1) ** 2
