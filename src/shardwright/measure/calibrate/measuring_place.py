"""The place of a rank's measurements: its device, dtype and clock, with tensors and modules to measure."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from shardwright.config.units import MIB
from shardwright.measure.calibrate.device_rounds import COLD_BYTES, DeviceClock, clock_of, rounds_call
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, name_parameters, placed_parameters
from shardwright.parallel.zero.unit_setting import dtype_of

# One call returns seconds of its forward, its backward and its weight gradient, as far as it has them.
Call = Callable[[], tuple[float, ...]]

_COLD_BYTES = 48 * MIB  # more than a CPU's caches hold
_MOST_COPIES = 32
_DRAWN = 2**16


@dataclass(frozen=True)
class Place:
    """The place of a rank's measurements: its device, a dtype, and the sharding of a layer that it shares with nobody.
    With a clock, calls are timed by rounds (device_rounds.py)."""

    device: torch.device
    dtype: torch.dtype
    sharding: LayerSharding
    clock: DeviceClock | None = None

    @classmethod
    def of(cls, axis: Axis, device: torch.device, number: str) -> "Place":
        """A place of a rank that shares no layer with others."""
        return cls(device, dtype_of(number), LayerSharding.of_tp(axis.alone("tp")), clock_of(device))

    def random(self, *shape: int) -> Tensor:
        """Random numbers like activations; a few of them are repeated, because drawing all takes long."""
        count = prod(shape)
        drawn = torch.randn(min(count, _DRAWN), device=self.device).to(self.dtype)
        return drawn.repeat(-(-count // _DRAWN))[:count].view(shape) if count > _DRAWN else drawn.view(shape)

    def filled(self, module: nn.Module) -> nn.Module:
        """The module with weights, and with gradients to accumulate, in memory."""
        name_parameters(module, self.device, self.dtype)
        for parameter in placed_parameters(module).values():
            parameter.data = self.random(*parameter.shape) * 0.02
            with_gradient(parameter)
        return module

    def product_between(self) -> Callable[[], None]:
        """The work between operators in a step: a product, which fills the caches with other data."""
        x, weight = self.random(256, 1024), self.random(1024, 1024)
        out = torch.empty_like(x)

        def compute() -> None:
            torch.mm(x, weight, out=out)

        return compute

    def timing(self, passes: Sequence[Callable[[int], object]], is_after_product: bool = False) -> Call:
        """A call of passes, one after the other. Without a clock each runs once, after the work between operators if
        `is_after_product`."""
        if self.clock is not None:
            return rounds_call(self.clock, passes)
        compute_product = self.product_between() if is_after_product else lambda: None

        def call() -> tuple[float, ...]:
            compute_product()
            times = [self.now_s()]
            for work in passes:
                work(0)
                times.append(self.now_s())
            return tuple(end - start for start, end in pairwise(times))

        return call

    def copies_of(self, num_bytes: float) -> int:
        """Number of consecutive calls with tensors of their own, so that caches don't hold them all."""
        cold_bytes = _COLD_BYTES if self.clock is None else COLD_BYTES
        return int(min(_MOST_COPIES, max(1, cold_bytes // max(1.0, num_bytes))))

    def now_s(self) -> float:
        """The time at which all launched work is over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def with_gradient(parameter: PlacedParameter) -> None:
    """Give a parameter a gradient to accumulate."""
    parameter.gradient = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    parameter.has_gradient = True
