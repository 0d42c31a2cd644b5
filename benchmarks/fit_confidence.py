"""How sure a predicted difference between two plans is, fitted to published sweeps.

    python benchmarks/fit_confidence.py            # writes catalog/confidence.toml, prints how it is calibrated

A sweep is what one family of truth/runs.csv has of one model on one kind of device. Its pairs are plans of one
publication that differ in nothing but the plan: the same software, devices, batch and number types. Of each pair the
logarithm of the measured ratio of both steps, less that of the predicted one, is a residual, in which errors common to
both cancel. Steps are predicted by constants that were fitted without the family (catalog/left_out.toml).

Residuals follow Student's t distribution around 0. The square of its spread is a sum over what differs between the
plans (planner/advice/confidence.py). Maximum a posteriori: each spread is known to a factor of 2 from one that all
share, which is fitted too, so that a kind of which there are few pairs has about that. Pairs of a sweep share their
errors, so each sweep weighs 1, however many pairs it has. Degrees of freedom are those that fit best.

No sweep of truth/runs.csv has plans with state in host memory. The spread of this kind is the likeliest of sweeps in
HOSTED, to which nothing is fitted, where those of all other kinds stay as they are.

Run it after fit_costs.py, and whenever what is predicted of a run has changed.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from fit_costs import HERE, step_seconds, usable

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.runs import Measured, read_runs
from shardwright.planner.advice.confidence import DIFFERENCES, RatioSpread, differing

TARGET = HERE.parent / "src/shardwright/config/catalog/confidence.toml"
KNOWN_TO = math.log(2.0)  # standard deviation of the logarithm of a spread
FREEDOMS = range(2, 11)
HOSTED = ("unseen-3.csv", "offload.csv")
HOSTED_SPREADS = [step / 100 for step in range(1, 200)]
# Stated confidences that are held against what was measured, each from one end to the other.
BINS = ((0.65, 0.75), (0.75, 0.85), (0.85, 0.95), (0.95, 1.0))


@dataclass(frozen=True)
class Pair:
    """Two plans of a sweep: what differs, and logarithms of the second's step over the first's."""

    sweep: Hashable
    kinds: frozenset[str]
    measured: float
    predicted: float


@dataclass(frozen=True)
class Calibration:
    """Pairs whose stated confidence lies between two ends: how many, of how many sweeps, their mean confidence, and the
    share of them of which the plan was faster that was said to be, by pairs and where each sweep weighs 1."""

    low: float
    high: float
    num_pairs: int
    num_sweeps: int
    stated: float
    right: float
    right_by_sweeps: float


def pairs() -> list[Pair]:
    """All of them."""
    rows = usable(read_runs(HERE / "truth" / "runs.csv"))
    without = left_out()
    results: list[Pair] = []
    for family in sorted({row.family for row in rows}):
        own = [row for row in rows if row.family == family]
        predicted_s = step_seconds(own, shipped() | without.get(family, {}))
        results += _pairs_of(own, predicted_s.tolist())
    return results


def _pairs_of(rows: Sequence[Measured], predicted_s: Sequence[float]) -> Iterator[Pair]:
    """The pairs of a family. Steps of one plan that was measured more than once are one, their geometric mean."""
    alike: dict[Hashable, dict[Hashable, list[tuple[Measured, float]]]] = {}
    for row, seconds in zip(rows, predicted_s, strict=True):
        run, grid = row.run, row.run.grid
        numbers = grid.precision, grid.gradient_bytes, grid.reduce_bytes
        key = row.publication, replace(run, grid=None), grid.world, grid.global_batch, numbers
        alike.setdefault(key, {}).setdefault(grid, []).append((row, seconds))
    for by_cut in alike.values():
        plans = [
            (grid, np.mean([np.log((row.step_s, seconds)) for row, seconds in runs], axis=0), runs[0][0])
            for grid, runs in by_cut.items()
        ]
        for (first, before, row), (second, after, _) in combinations(plans, 2):
            if kinds := differing(first, second):
                measured, predicted = (after - before).tolist()
                yield Pair((row.family, row.run.shape, row.run.device), kinds, measured, predicted)


def fit(some: Sequence[Pair]) -> RatioSpread:
    """The spread that fits pairs best, with the degrees of freedom that do."""
    kinds = [kind for kind in DIFFERENCES if any(kind in pair.kinds for pair in some)]
    differs = np.array([[kind in pair.kinds for kind in kinds] for pair in some], float)
    residuals = np.array([pair.measured - pair.predicted for pair in some])
    count = Counter(pair.sweep for pair in some)
    weights = np.array([1 / count[pair.sweep] for pair in some])
    _, freedom, spreads = min(
        (loss, freedom, spreads)
        for freedom in FREEDOMS
        for loss, spreads in [_spreads(differs, residuals, weights, freedom)]
    )
    return RatioSpread(freedom, dict(zip(kinds, spreads, strict=True)), max(spreads))


def _spreads(
    differs: np.ndarray, residuals: np.ndarray, weights: np.ndarray, freedom: int
) -> tuple[float, list[float]]:
    """(loss, spreads) by Fisher scoring on the logarithms of the spreads, the last of which is the shared one."""
    num = differs.shape[1]
    apart = np.hstack([np.eye(num), -np.ones((num, 1))]) / KNOWN_TO  # of each spread from the shared one
    x, constant = np.full(num + 1, math.log(0.04)), _log_density(freedom)

    def loss(x: np.ndarray) -> float:
        squares = differs @ np.exp(2 * x[:num])
        log_density = constant - np.log(squares) / 2
        log_density -= (freedom + 1) / 2 * np.log1p(residuals**2 / (freedom * squares))
        return float(((apart @ x) ** 2).sum() / 2 - (weights * log_density).sum())

    now, gained = loss(x), math.inf
    while gained > 1e-10:
        jacobian = 2 * differs * np.exp(2 * x[:num])
        squares = differs @ np.exp(2 * x[:num])
        ratio = residuals**2 / squares
        slope = (1 - (freedom + 1) * ratio / (freedom + ratio)) / (2 * squares)
        information = freedom / (2 * (freedom + 3) * squares**2)
        gradient, curvature = apart.T @ (apart @ x), apart.T @ apart + 1e-9 * np.eye(num + 1)
        gradient[:num] += jacobian.T @ (weights * slope)
        curvature[:num, :num] += jacobian.T @ ((weights * information)[:, None] * jacobian)
        step, gained = np.linalg.solve(curvature, gradient), 0.0
        for halved in range(20):
            moved = x - step / 2**halved
            if (result := loss(moved)) < now:
                x, gained, now = moved, now - result, result
                break
    return now, np.exp(x[:num]).tolist()


def _log_density(freedom: int) -> float:
    """Logarithm of the density of Student's t at 0."""
    return math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2


def left_out_confidences(some: Sequence[Pair]) -> list[float]:
    """Of each pair how sure it is that the plan is faster that is predicted to be, by a fit to all other sweeps."""
    spreads = {
        sweep: fit([pair for pair in some if pair.sweep != sweep]) for sweep in dict.fromkeys(p.sweep for p in some)
    }
    return [spreads[pair.sweep].confidence(abs(pair.predicted), pair.kinds) for pair in some]


def calibration(some: Sequence[Pair], confidences: Sequence[float], low: float, high: float) -> Calibration:
    """The outcome of the pairs whose confidence is from `low` to below `high`, which may be 1."""
    count = Counter(pair.sweep for pair in some)
    called = [(p, sure) for p, sure in zip(some, confidences, strict=True) if low <= sure < high or sure == high == 1]
    right = np.array([pair.measured * pair.predicted > 0 for pair, _ in called], float)
    weights = np.array([1 / count[pair.sweep] for pair, _ in called])
    return Calibration(
        low, high, len(called), len({pair.sweep for pair, _ in called}), float(np.mean([sure for _, sure in called])),
        float(right.mean()), float((weights * right).sum() / weights.sum()),
    )  # fmt: skip


def hosted_pairs() -> list[Pair]:
    """Pairs of a plan with state in host memory and one without."""
    results: list[Pair] = []
    for table in HOSTED:
        rows = usable(read_runs(HERE / "truth" / table))
        for family in sorted({row.family for row in rows}):
            own = [row for row in rows if row.family == family]
            priced = _pairs_of(own, step_seconds(own, shipped()).tolist())
            results += [pair for pair in priced if "offload" in pair.kinds]
    return results


def hosted_spread(result: RatioSpread, some: Sequence[Pair]) -> float:
    """The likeliest spread of state in host memory, beside those of the other kinds."""
    count = Counter(pair.sweep for pair in some)

    def likelihood(spread: float) -> float:
        total = 0.0
        for pair in some:
            square = result.of(pair.kinds - {"offload"}) ** 2 + spread**2
            residual = pair.measured - pair.predicted
            log_density = -math.log(square) / 2
            log_density -= (result.freedom + 1) / 2 * math.log1p(residual**2 / (result.freedom * square))
            total += log_density / count[pair.sweep]
        return total

    return max(HOSTED_SPREADS, key=likelihood)


def text(found: RatioSpread) -> str:
    """The catalog's file."""
    lines = ["# Written by benchmarks/fit_confidence.py.", f"freedom = {found.freedom}", "", "[spread]"]
    lines += [f"{kind} = {spread:.2g}" for kind, spread in found.by_kind.items()]
    return "\n".join([*lines, "", "[hosted]", f"offload = {hosted_spread(found, hosted_pairs()):.2g}"]) + "\n"


def main() -> None:
    """Write the file and print the calibration."""
    some = pairs()
    result = fit(some)
    TARGET.write_text(text(result))
    print(f"{len(some):,} pairs of {len({pair.sweep for pair in some})} sweeps; {TARGET.name}:\n{text(result)}")
    for kind in result.by_kind:
        with_it = [pair for pair in some if kind in pair.kinds]
        print(f"  {kind}: {len(with_it):,} pairs of {len({pair.sweep for pair in with_it})} sweeps")
    confidences = left_out_confidences(some)
    print("\nEach sweep by a fit to the others: stated confidence, pairs, sweeps, mean of it, right, right by sweeps")
    for low, high in (*BINS, *((low, 1.0) for low in (0.7, 0.8, 0.9))):
        of = calibration(some, confidences, low, high)
        shares = f"{of.stated:.1%}  {of.right:.1%}  {of.right_by_sweeps:.1%}"
        print(f"  {low:.0%} to {high:.0%}  {of.num_pairs:5,} {of.num_sweeps:3}  {shares}")


if __name__ == "__main__":
    main()
