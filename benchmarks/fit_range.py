"""How far off a prediction is where nothing was fitted: the range that four of five steps lie in.

    python benchmarks/fit_range.py                 # writes the ends of the range into catalog/calibrations/common.toml

Families of truth/runs.csv by constants that were fitted without them, and the tables to which nothing is fitted by the
shipped ones. Families weigh alike. There are two ranges: of runs whose software is known, and
of the same runs as they would be predicted if nothing said what ran them. Run it after fit_costs.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from fit_costs import HERE, step_seconds, usable, weights_of, write

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.runs import Measured, measured
from shardwright.measure.measured_runs.score import percentile

# By table the constants that replace the shipped ones, by family.
TABLES = {"runs.csv": left_out(), "others.csv": {}, "playbook.csv": {}, "runs-2026.csv": {}}
OUTSIDE = 0.1  # share of runs below the range, and above it


def misses(*, is_named: bool = True) -> Iterator[tuple[float, float]]:
    """Of each run of tier A measured over predicted seconds, and its weight, 1 a family; if not `is_named`, of runs
    whose rows have lost the columns of software."""
    for table, without in TABLES.items():
        rows = [row for row in usable(_rows(table, is_named)) if row.tier == "A"]
        for family in sorted({row.family for row in rows}):
            mine = [row for row in rows if row.family == family]
            ratios = [row.step_s for row in mine] / step_seconds(mine, shipped() | without.get(family, {}))
            yield from zip(ratios.tolist(), weights_of(mine).tolist(), strict=True)


def _rows(table: str, is_named: bool) -> list[Measured]:
    lines = read_lines(HERE / "truth" / table)
    unnamed = {} if is_named else dict.fromkeys(SOFTWARE_COLUMNS, "")
    return [measured(replace(line, row=line.row | unnamed)) for line in lines]


def main() -> None:
    """Write the ends of both ranges, and say how many runs lie between them."""
    constants = {name: value for name, value in shipped().items() if name.startswith("common.")}
    for prefix in ("", "unnamed_"):
        ratios, weights = zip(*misses(is_named=not prefix), strict=True)
        low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
        low, high = math.floor(1e4 * low) / 1e4, math.ceil(1000 * high) / 1000  # the runs at the ends lie between
        constants |= {f"common.{prefix}low": low, f"common.{prefix}high": high}
        inside = sum(low <= ratio <= high for ratio in ratios)
        print(
            f"{prefix}{low:.4g} to {high:.4g}; {inside} of {len(ratios)} runs lie between, {sum(weights):.0f} families"
        )
    write(constants)


if __name__ == "__main__":
    main()
