"""How far off a prediction is where nothing was fitted: the range that four of five steps lie in.

    python benchmarks/fit_range.py                 # writes low and high into catalog/calibrations/common.toml

From both tables: families of truth/runs.csv by constants that were fitted without them, and truth/others.csv, to which
nothing is fitted, by the shipped ones. Families weigh alike. Run it after fit_costs.py.
"""

import re
from collections.abc import Iterator

from fit_costs import CATALOG, HERE, step_seconds, usable, weights_of

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.runs import Measured, read_runs
from shardwright.measure.score import percentile

FILE = CATALOG / "common.toml"
OUTSIDE = 0.1  # share of runs below the range, and above it


def misses() -> Iterator[tuple[float, float]]:
    """Of each run of tier A measured over predicted seconds, and its weight, 1 a family."""
    fitted = shipped()
    rows = read_table("runs.csv")
    for family in sorted({row.family for row in rows}):
        yield from _misses([row for row in rows if row.family == family], fitted | left_out()[family])
    others = read_table("others.csv")
    for family in sorted({row.family for row in others}):
        yield from _misses([row for row in others if row.family == family], fitted)


def read_table(name: str) -> list[Measured]:
    """The runs of tier A of a table."""
    return [row for row in usable(read_runs(HERE / "truth" / name)) if row.tier == "A"]


def _misses(rows: list[Measured], constants: dict[str, float]) -> Iterator[tuple[float, float]]:
    ratios = [row.step_s for row in rows] / step_seconds(rows, constants)
    yield from zip(ratios.tolist(), weights_of(rows).tolist(), strict=True)


def main() -> None:
    """Write the two constants, and say how many runs lie between them."""
    ratios, weights = zip(*misses(), strict=True)
    low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
    text = FILE.read_text()
    for name, value in (("low", low), ("high", high)):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value:.4g}", text, flags=re.MULTILINE)
    FILE.write_text(text)
    inside = sum(low <= ratio <= high for ratio in ratios)
    print(f"{low:.4g} to {high:.4g}; {inside} of {len(ratios)} runs lie between, {sum(weights):.0f} families")


if __name__ == "__main__":
    main()
