"""Fit the constants of one cluster to measured runs on it, and hold some of them back to see if that helps.

Maximum a posteriori by Gauss-Newton on the logarithms, as benchmarks/fit_costs.py fits the catalog: each constant is
known to a factor from the catalog's value, and large errors count by their absolute value, so that few rows move
little and an odd row bends nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.base import PlanError
from shardwright.config.cluster import DeviceSpec
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_part
from shardwright.cost.calibration import Constants, device_constant, device_of, is_known, shipped
from shardwright.layers.arrays import Array
from shardwright.measure.measured_runs.runs import Measured
from shardwright.measure.measured_runs.score import percentile, weights_of
from shardwright.measure.validate import predict
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import step_time

FEWEST_ROWS = 4  # of different plans
_FOLDS = 5
_ROBUST = 0.03  # errors below this count by their square
_STRENGTH = 0.002  # how much the catalog's values count beside all rows
_ROUNDS = 12
_MOST = math.log(2.0)  # of a constant's change
_TINY = 1e-3


@dataclass(frozen=True)
class Knob:
    """Constants that change together, by one factor, and the factor that one standard deviation is."""

    names: tuple[str, ...]
    factor: float


_KERNELS = [kernel for kernel in ATTENTION_KERNELS.values() if not kernel.number]  # of 16 bits
# Constants that nobody knows of some devices.
_OF_FEW = {kernel.constant for kernel in _KERNELS if kernel.otherwise}
KNOBS = (
    Knob(("product", "product8", "product4"), 1.1),
    Knob(tuple(dict.fromkeys(kernel.constant for kernel in _KERNELS)), 1.15),
    Knob(("memory",), 1.1),
    Knob(("link", "switch_reduce"), 1.15),
    Knob(("leak",), 1.3),
    Knob(("step_s",), 1.5),
)


@dataclass(frozen=True)
class ClusterFit:
    """A device's fitted constants, and median errors: of all rows with the catalog's constants and with the fitted, and
    of rows held back, with those that were fitted without them."""

    device: str
    rows: int
    constants: Mapping[str, float]
    before: float
    after: float
    held_back: float

    @property
    def helps(self) -> bool:
        """True if rows held back are predicted better than by the catalog."""
        return self.held_back < self.before

    def entry(self) -> dict[str, Any]:
        """The fields of a device's file with the fitted constants."""
        device = device_of(self.device)
        fields = device.model_dump(exclude_unset=True, exclude={"name", "aliases", "cuda_names"})
        source = f"{device.source}; constants fitted to {self.rows} measured runs by shardwright validate --fit"
        rounded = {name: float(f"{value:.4g}") for name, value in self.constants.items()}
        return fields | {"source": source, "constants": fields.get("constants", {}) | rounded}

    def to_dict(self) -> dict[str, Any]:
        """The fit for --json."""
        return {
            "device": self.device,
            "rows": self.rows,
            "constants": dict(self.constants),
            "median_ape": self.after,
            "catalog_median_ape": self.before,
            "held_back_median_ape": self.held_back,
            "helps": self.helps,
        }


def fit_cluster(rows: Sequence[Measured]) -> ClusterFit:
    """The constants of the rows' device that predict them best. PlanError if the rows are of several devices, or of too
    few plans."""
    rows = _priced_rows(rows)
    groups = list(dict.fromkeys(row.group for row in rows))
    devices = sorted({row.run.device for row in rows if row.run})
    faults = []
    if len(devices) > 1:
        faults.append(
            say(
                "the table has runs on {devices}, and --fit fits one device; leave one in the table",
                devices=tuple(devices),
            )
        )
    if len(groups) < FEWEST_ROWS:
        faults.append(
            say(
                "{count} plans have a measured step that can be predicted; --fit needs {fewest_rows}",
                count=len(groups),
                fewest_rows=FEWEST_ROWS,
            )
        )
    if faults:
        raise PlanError("table", faults)
    problem = _Problem(device_of(devices[0]), tuple(rows))
    fitted, still = problem.fit(), np.zeros(len(KNOBS))
    held_back = np.empty(len(rows))
    for fold in range(min(_FOLDS, len(groups))):
        tell_part(say("fitting constants with some runs held back"), fold, min(_FOLDS, len(groups)))
        out = np.array([groups.index(row.group) % min(_FOLDS, len(groups)) == fold for row in rows])
        others = replace(problem, rows=tuple(row for row, is_out in zip(rows, out, strict=True) if not is_out))
        held_back[out] = problem.errors(others.fit())[out]
    weights = weights_of(rows)
    medians = [
        percentile(list(np.abs(np.exp(log_errors) - 1)), weights, 0.5)
        for log_errors in (problem.errors(still), problem.errors(fitted), held_back)
    ]
    return ClusterFit(problem.device.name, len(rows), problem.constants(fitted), *map(float, medians))


def _priced_rows(rows: Sequence[Measured]) -> list[Measured]:
    """The rows that tell a device's constants, each with the run that `validate` prices: where a row states no
    recomputation, the least that fits."""
    told = [row for row in rows if row.run and row.step_s and not row.faults and row.tier in "AB"]
    return [replace(p.row, run=p.priced_run) for p in predict(told, shipped()) if p.priced_run]


@dataclass(frozen=True)
class _Problem:
    """The rows of one device; points are logarithms of the factors of KNOBS."""

    device: DeviceSpec
    rows: tuple[Measured, ...]

    def constants(self, point: Array) -> dict[str, float]:
        """The device's constants at a point, without those of kernels of which nothing is known on the device."""
        constants, values = shipped(), {}
        for knob, change in zip(KNOBS, point, strict=True):
            for name in knob.names:
                if name in _OF_FEW and not is_known(constants, self.device, name):
                    continue
                value = device_constant(constants, self.device, name) * math.exp(change)
                values[name] = value if name in ("leak", "step_s") else min(1.0, value)
        return values

    def errors(self, point: Array) -> Array:
        """Logarithms of predicted over measured seconds."""
        constants: Constants = shipped() | {
            f"{self.device.generation}.{name}": value for name, value in self.constants(point).items()
        }
        predicted_s = np.empty(len(self.rows))
        for run, places in batches([row.run for row in self.rows if row.run]):
            predicted_s[places] = step_time(run, constants).total
        return np.log(predicted_s / [row.step_s for row in self.rows])

    def fit(self) -> Array:
        """The best point."""
        return _least(self.errors, np.array([math.log(knob.factor) for knob in KNOBS]))


def _least(errors_at: Callable[[Array], Array], spread: Array) -> Array:
    """The point of least loss: Gauss-Newton with weights that turn squares of large errors into absolute values."""

    def loss(errors: Array, point: Array) -> float:
        size = np.abs(errors)
        cost = np.where(size < _ROBUST, errors**2 / (2 * _ROBUST), size - _ROBUST / 2)
        return float(cost.mean() + _STRENGTH * ((point / spread) ** 2).sum() / 2)

    point = np.zeros(len(spread))
    errors = errors_at(point)
    best, damping = loss(errors, point), 1e-3
    for _ in range(_ROUNDS):
        moves = _TINY * np.eye(len(spread))
        jacobian = np.stack([(errors_at(point + move) - errors) / _TINY for move in moves], axis=1)
        weights = 1 / np.maximum(np.abs(errors), _ROBUST) / len(errors)
        matrix = jacobian.T @ (weights[:, None] * jacobian) + np.diag(_STRENGTH / spread**2)
        slope = jacobian.T @ (weights * errors) + _STRENGTH * point / spread**2
        step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope)
        moved = np.clip(point - step, -_MOST, _MOST)
        moved_errors = errors_at(moved)
        if (moved_loss := loss(moved_errors, moved)) < best:
            gained, point, errors, best, damping = best - moved_loss, moved, moved_errors, moved_loss, damping / 8
            if gained < 1e-6:
                break
        else:
            damping *= 8
    return point
