"""Seconds of an operator or a collective from measurements, by its sizes (config/measured_table.py).

Between measured sizes seconds are interpolated linearly in logarithms, along each dimension: this is exact for seconds
that grow with a power of a size, and depends only on the neighbouring sizes. Below the smallest size the seconds are
those of the smallest; beyond the largest they grow with the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import get_args

import numpy as np

from shardwright.config.cluster import DeviceSpec
from shardwright.config.measured_table import Carried, MeasuredTable, sizes_of
from shardwright.layers.arrays import Array, Numbers

# The powers of its sizes with which work grows, if it is not proportional to all of them.
_POWERS: dict[str, tuple[float, ...]] = {
    "attention": (2.0, 1.0),
    **dict.fromkeys(get_args(Carried), (0.0, 1.0)),
}


def powers_of(work: str) -> tuple[float, ...]:
    """The power of each of its sizes with which work grows."""
    return _POWERS.get(work, (1.0,) * len(sizes_of(work)))


PASSES = ("seconds", "backward", "weight_grad")


@dataclass(frozen=True)
class Surface:
    """Logarithms of seconds (`heights`) over logarithms of sizes (`sides`, one for each dimension)."""

    sides: tuple[Array, ...]
    heights: Array
    powers: tuple[float, ...]

    @classmethod
    def of(cls, table: MeasuredTable, column: str) -> "Surface":
        """The surface of one column of a table."""
        sides = tuple(np.log(np.asarray(side, dtype=float)) for side in table.sizes)
        seconds = np.asarray(getattr(table, column), dtype=float).reshape([len(side) for side in sides])
        return cls(sides, np.log(seconds), powers_of(table.work))

    def at(self, *sizes: Numbers) -> Numbers:
        """Seconds at some sizes, which are numbers or arrays of one shape."""
        growth: Numbers = 0.0
        corners: list[list[tuple[Numbers, Numbers]]] = []  # along each side: (index, weight) of its two neighbours
        for side, power, size in zip(self.sides, self.powers, np.broadcast_arrays(*sizes), strict=True):
            place = np.log(np.maximum(1.0, size))
            growth = growth + power * np.maximum(0.0, place - side[-1])
            corners.append(_neighbours(side, np.clip(place, side[0], side[-1])))
        height: Numbers = 0.0
        for corner in combinations(*corners):
            weight: Numbers = 1.0
            for _, share in corner:
                weight = weight * share
            height = height + weight * self.heights[tuple(index for index, _ in corner)]
        return np.exp(height + growth)


def _neighbours(side: Array, place: Numbers) -> list[tuple[Numbers, Numbers]]:
    """The measured sizes around a place, as (index, weight)."""
    if len(side) == 1:
        return [(np.zeros(np.shape(place), np.int64), 1.0)]
    low = np.clip(np.searchsorted(side, place, side="right") - 1, 0, len(side) - 2)
    share = (place - side[low]) / (side[low + 1] - side[low])
    return [(low, 1.0 - share), (low + 1, share)]


@dataclass(frozen=True)
class MeasuredDevice:
    """All surfaces of a device, by (work, number type, column), each for several numbers of busy ranks.

    `is_shared`: ranks share the device, as on a CPU; more ranks than were measured then share its measured rate.
    """

    surfaces: dict[tuple[str, str, str], tuple[tuple[int, Surface], ...]]
    is_shared: bool = False

    def knows(self, work: str, number: str) -> bool:
        """True if a kind of work was measured in a number type."""
        return (work, number, "seconds") in self.surfaces

    def seconds(self, work: str, number: str, busy: Numbers, *sizes: Numbers) -> tuple[Numbers, ...]:
        """Seconds of forward, backward and weight gradient, those that the work has, with `busy` ranks at work.

        The work must be measured. Numbers of busy ranks that were not measured take the next smaller one's seconds; if
        ranks share the device and are more than were measured, proportionally longer.
        """
        columns = [column for column in PASSES if (work, number, column) in self.surfaces]
        return tuple(self._of(self.surfaces[work, number, column], busy, sizes) for column in columns)

    def collective_s(self, kind: str, number: str, ranks: Numbers, size_bytes: Numbers) -> Numbers:
        """Seconds of a collective of `size_bytes`, counted as in parallel/comm. It must be measured.

        With more ranks than were measured, seconds are those of the most measured ranks with a larger tensor, so that
        each rank sends as much.
        """
        surface = self.surfaces[kind, number, "seconds"][0][1]
        most = np.exp(surface.sides[0][-1])
        if kind not in ("exchange", "message"):
            size_bytes = size_bytes * np.where(ranks > most, (1 - 1 / np.maximum(ranks, 2)) / (1 - 1 / most), 1.0)
        return np.where(size_bytes > 0, surface.at(np.minimum(ranks, most), size_bytes), 0.0)

    def _of(self, by_busy: Sequence[tuple[int, Surface]], busy: Numbers, sizes: tuple[Numbers, ...]) -> Numbers:
        seconds = by_busy[0][1].at(*sizes)
        for least, surface in by_busy[1:]:
            seconds = np.where(busy >= least, surface.at(*sizes), seconds)
        return seconds * np.maximum(1.0, busy / by_busy[-1][0]) if self.is_shared else seconds


def measured_device(device: DeviceSpec) -> MeasuredDevice | None:
    """The measurements of a device; None if there are none."""
    if not device.measured:
        return None
    tables: dict[tuple[str, str, str], dict[int, Surface]] = {}
    for table in device.measured:
        for column in PASSES:
            if getattr(table, column):
                tables.setdefault((table.work, table.number, column), {})[table.busy] = Surface.of(table, column)
    surfaces = {key: tuple(sorted(by_busy.items(), key=lambda item: item[0])) for key, by_busy in tables.items()}
    return MeasuredDevice(surfaces, is_shared=device.generation == "cpu")
