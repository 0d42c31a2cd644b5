"""How far off a prediction is where nothing was fitted: the range that four of five steps lie in.

    python benchmarks/fit_range.py                 # writes low and high into catalog/calibrations/common.toml

From both tables: families of truth/runs.csv by constants that were fitted without them, and truth/others.csv, to which
nothing is fitted, by the shipped ones. Families weigh alike. Run it after fit_costs.py.
"""

from collections.abc import Iterator

from fit_costs import HERE, step_seconds, usable, weights_of, write

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.measured_runs.score import percentile

OUTSIDE = 0.1  # share of runs below the range, and above it


def misses() -> Iterator[tuple[float, float]]:
    """Of each run of tier A measured over predicted seconds, and its weight, 1 a family."""
    for table, without in (("runs.csv", left_out()), ("others.csv", {})):
        rows = [row for row in usable(read_runs(HERE / "truth" / table)) if row.tier == "A"]
        for family in sorted({row.family for row in rows}):
            mine = [row for row in rows if row.family == family]
            ratios = [row.step_s for row in mine] / step_seconds(mine, shipped() | without.get(family, {}))
            yield from zip(ratios.tolist(), weights_of(mine).tolist(), strict=True)


def main() -> None:
    """Write the two constants, and say how many runs lie between them."""
    ratios, weights = zip(*misses(), strict=True)
    low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
    common = {name: value for name, value in shipped().items() if name.startswith("common.")}
    write(common | {"common.low": low, "common.high": high})
    inside = sum(low <= ratio <= high for ratio in ratios)
    print(f"{low:.4g} to {high:.4g}; {inside} of {len(ratios)} runs lie between, {sum(weights):.0f} families")


if __name__ == "__main__":
    main()
