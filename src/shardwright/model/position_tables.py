"""Tables of positions and heads that the layers share: cosines and sines of rotary positions, factors of queries that
grow with the position, and slopes of ALiBi; and the positions of a rank's tokens as a tensor.

Shape suffixes: S sequence, s positions of this rank, B batch, N query heads.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.config.attention_sections import TemperatureSpec
from shardwright.config.model import ModelSpec
from shardwright.config.rotary_scaling import RotaryScalingSpec
from shardwright.model.rotary import rotary_angles
from shardwright.sharding.sequence import Ranges


@dataclass(frozen=True)
class PositionTables:
    """Tables for the positions that attention sees on a rank. `turned` are cosine and sine of rotary positions;
    `windowed` are those of layers with a window, None if they are the same. `temperatures` [S, 1, 1, 1, 1], or with
    separate documents [S, B, 1, 1, 1], multiply queries that grow with their position. `slopes_N` are the ALiBi
    slopes of all heads of the model."""

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
        settings = spec.rotary_base, spec.rotary_scaling
        window_settings = (
            window.rotary_base or spec.rotary_base,
            spec.rotary_scaling if window.rotary_scaled else RotaryScalingSpec(),
        )
        turned = rotary_angles(positions_S, spec.rotary_width, *settings, spec.sequence)
        windowed = None
        if window.size and window_settings != settings:
            windowed = rotary_angles(positions_S, spec.rotary_width, *window_settings, spec.sequence)
        return cls(turned, windowed, temperatures)

    def in_documents(self, spec: ModelSpec, positions_SB: Tensor) -> "PositionTables":
        """The tables of a pass with separate documents. `positions_SB` are the positions of tokens in their documents.
        Angles and slopes stay: they depend on the distance of two tokens, wherever their document begins."""
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
        optional = (self.temperatures, self.slopes_N)
        return [*(self.turned or ()), *(self.windowed or ()), *(tensor for tensor in optional if tensor is not None)]


def temperatures_of(tuning: TemperatureSpec, positions: Tensor) -> Tensor:
    """The factor of the query at each position, float32."""
    return ((positions.float() + tuning.first_position) / tuning.floor).floor().log1p() * tuning.scale + 1


def alibi_slopes(heads: int) -> list[float]:
    """The ALiBi slopes of heads, Press et al. 2022 (arXiv 2108.12409, section 3): 2^(-8 i / n) for head i of n, if n is
    a power of two; else the slopes of the next lower power, then every second slope of the next higher power, as in the
    released code."""
    power = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def positions_tensor(ranges: Ranges, device: torch.device) -> Tensor:
    """The positions in the ranges, [s], int64."""
    if len(ranges) == 1:
        return torch.arange(ranges[0].start, ranges[0].stop, device=device)
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in ranges])


def pick(x_BS: Tensor, ranges: Ranges) -> Tensor:
    """The elements at the positions in the ranges, [B, s]: a view, if there is one range."""
    parts = [x_BS[:, r.start : r.stop] for r in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
