"""Tables that layers look up by the position of a token, and by head: cosines and sines of rotary positions, factors of
queries that grow with their position, and slopes of ALiBi."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.config.model import ModelSpec
from shardwright.config.rotary_scaling import RotaryScalingSpec
from shardwright.config.temperature import TemperatureSpec
from shardwright.model.rotary import rotary_angles


@dataclass(frozen=True)
class PositionTables:
    """Numbers of the positions that attention sees on a rank. `windowed` are cosine and sine in layers with a window,
    where they are others than those of all layers. `temperatures` [S, 1, 1, 1, 1], or [S, B, 1, 1, 1] where documents
    are separate, are for queries in layers that turn nothing. `slopes_N` are of all heads of the model."""

    turned: tuple[Tensor, Tensor] | None = None
    windowed: tuple[Tensor, Tensor] | None = None
    temperatures: Tensor | None = None
    slopes_N: Tensor | None = None

    @classmethod
    def of(cls, spec: ModelSpec, positions_S: Tensor) -> "PositionTables":
        """The tables of a model at some positions."""
        if spec.positions == "alibi":
            scale = spec.softmax_scale if spec.alibi_scaled else 1.0
            slopes_N = torch.tensor(alibi_slopes(spec.heads)).to(positions_S.device, non_blocking=True)
            return cls(slopes_N=slopes_N * scale)
        if spec.positions != "rotary":
            return cls()
        temperatures = None
        if spec.temperature_tuning.scale:
            temperatures = temperatures_of(spec.temperature_tuning, positions_S)[:, None, None, None, None]
        window = spec.window
        of_all = spec.rotary_base, spec.rotary_scaling
        of_windowed = (
            window.rotary_base or spec.rotary_base,
            spec.rotary_scaling if window.rotary_scaled else RotaryScalingSpec(),
        )
        turned = rotary_angles(positions_S, spec.rotary_width, *of_all, spec.sequence)
        windowed = None
        if window.size and of_windowed != of_all:
            windowed = rotary_angles(positions_S, spec.rotary_width, *of_windowed, spec.sequence)
        return cls(turned, windowed, temperatures)

    def in_documents(self, spec: ModelSpec, positions_SB: Tensor) -> "PositionTables":
        """The tables of a pass whose samples have documents, which the tokens that attention sees have these positions
        in. Angles and slopes stay: they say how far apart two tokens are, wherever their document begins."""
        if self.temperatures is None:
            return self
        temperatures_SB = temperatures_of(spec.temperature_tuning, positions_SB)
        return replace(self, temperatures=temperatures_SB[..., None, None, None])

    def angles(self, is_windowed: bool) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine in a layer with a window or without."""
        return self.windowed if is_windowed and self.windowed is not None else self.turned

    @property
    def tensors(self) -> list[Tensor]:
        """Every table that there is."""
        others = (self.temperatures, self.slopes_N)
        return [*(self.turned or ()), *(self.windowed or ()), *(tensor for tensor in others if tensor is not None)]


def temperatures_of(tuning: TemperatureSpec, positions: Tensor) -> Tensor:
    """The factor of the query at each position, float32."""
    return ((positions.float() + 1) / tuning.floor).floor().log1p() * tuning.scale + 1


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of heads, Press et al. 2022 (arXiv 2108.12409, section 3): 2^(-8 i / n) for head i of n, if that is a
    power of two; else those of the power below, and every second of the power above (as released)."""
    power = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
