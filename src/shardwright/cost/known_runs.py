"""Measured runs, and whether a run is like one of them: predictions of such runs are less often far off.

catalog/measured_runs.toml has the published runs of benchmarks/truth by family: those to which constants are fitted,
and others that were seen while software was described (benchmarks/fit_range.py writes it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.config import catalog
from shardwright.cost.calibration import device_of
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import Run

# How far apart the parameters and the devices of two runs that are alike may be, as factors.
PARAMETERS_APART, DEVICES_APART = 2.0, 4.0
_ROUNDED = 1e-9  # of factors: 2 and 4 times as much are alike


@dataclass(frozen=True)
class KnownRuns:
    """The measured runs of a family that one entry of software ran on one generation of devices in one number type:
    (billions of parameters, devices) of each. Constants are fitted to them or not."""

    family: str
    is_fitted: bool
    software: str
    generation: str
    number: str
    sizes: tuple[tuple[float, int], ...]


@lru_cache(maxsize=1)
def known_runs() -> tuple[KnownRuns, ...]:
    """All that the catalog has."""
    results = []
    for kind, families in catalog.read_measured_runs().items():
        for family, runs in families.items():
            for key, sizes in runs.items():
                software, generation, number = key.split()
                some = tuple((size, devices) for size, devices in sizes)
                results.append(KnownRuns(family, kind == "fitted", software, generation, number=number, sizes=some))
    return tuple(results)


def unlike(
    run: Run, without: frozenset[str] = frozenset(), known: Sequence[KnownRuns] | None = None
) -> tuple[Numbers, Numbers]:
    """For each plan of a run (1 if it is like no run that constants are fitted to, but like one that was measured; 1
    if it is like no measured run), else 0. `without` names families and generations whose runs are left out; `known`
    has the runs, None is those of the catalog.

    Runs are alike if the same software ran them on the same generation of devices in the same number type, with
    parameters and devices that are not far apart.
    """
    software, generation = run.software.partition("+")[0], device_of(run.device).generation
    key = software, generation, run.grid.precision
    parameters, devices = run.shape.parameters / 1e9, np.asarray(run.grid.world, dtype=float)
    near = {True: np.zeros(devices.shape, bool), False: np.zeros(devices.shape, bool)}
    for runs in known_runs() if known is None else known:
        if (runs.software, runs.generation, runs.number) != key or {runs.family, generation} & without:
            continue
        for size, number in runs.sizes:
            if _apart(size, parameters) <= PARAMETERS_APART:
                apart = np.maximum(devices / number, number / devices)
                near[runs.is_fitted] |= apart <= DEVICES_APART * (1 + _ROUNDED)
    return 1.0 * (near[False] & ~near[True]), 1.0 * ~(near[False] | near[True])


def _apart(first: float, second: float) -> float:
    return max(first / second, second / first) / (1 + _ROUNDED)
