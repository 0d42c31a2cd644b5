"""The spreads of the log of needed over predicted bytes, of memory/fit_chance.py, under which measured outcomes are
likeliest: of plans that ran, and of plans that ran out of memory. SPREAD is of rows as they are, UNNAMED_SPREAD of the
same rows with the columns of software emptied. A second likelihood, of measured peaks of memory, is printed beside
each.

    python benchmarks/fit_memory_spread.py
"""

import csv
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.runs import measured
from shardwright.measure.validate import predict
from shardwright.memory.fit_chance import SPREAD, UNNAMED_SPREAD, fit_chance, most_needed_bytes

TRUTH = Path(__file__).parent / "truth"
TABLES = (
    *("runs", "oom", "playbook-memory", "runs-2026", "others", "unseen", "unseen-2"),
    *("unseen-3", "unseen-4", "unseen-5", "unseen-6", "unseen-7", "unseen-8", "offload"),
)
SPREADS = [step / 200 for step in range(4, 121)]
CHANCES = (0.0, 0.02, 0.1, 0.5, 0.9, 0.98, 1.01)


@dataclass(frozen=True)
class Outcome:
    """A measured plan: the bytes that it is predicted to need over those of its device, if it ran, and the measured
    over the predicted peak, 0 if none was measured."""

    filled: float
    ran: bool
    peak: float


def main() -> None:
    """Print the likeliest spreads, and how many plans of each chance ran under those in use."""
    for is_named, in_use in ((True, SPREAD), (False, UNNAMED_SPREAD)):
        outcomes = [outcome for table in TABLES for outcome in measured_outcomes(table, is_named)]
        peaks = [outcome.peak for outcome in outcomes if outcome.peak]
        best = max(SPREADS, key=lambda spread: log_likelihood(outcomes, spread))
        of_peaks = max(SPREADS, key=lambda spread: sum(log_density(math.log(peak), spread) for peak in peaks))
        print(f"software {'as stated' if is_named else 'not stated'}: {len(outcomes)} plans, ", end="")
        print(f"{sum(outcome.ran for outcome in outcomes)} of them ran; {best:.3f} is likeliest, ", end="")
        print(f"{of_peaks:.3f} by {len(peaks)} peaks, {in_use:.3f} in use")
        for low, high in itertools.pairwise(CHANCES):
            chances = [(fit_chance(outcome.filled, 1.0, in_use), outcome.ran) for outcome in outcomes]
            among = [(chance, ran) for chance, ran in chances if low <= chance < high]
            expected = sum(chance for chance, _ in among)
            ran = sum(ran for _, ran in among)
            print(f"  chance {low:.2f} to {min(high, 1.0):.2f}: {ran} of {len(among)} ran, {expected:.0f} expected")


def measured_outcomes(table: str, is_named: bool) -> list[Outcome]:
    """The outcome of each sound row of tiers A and B, predicted as it is or as if nothing said its software. Rows whose
    recomputation is not known are left out, for the least that fits is assumed of them."""
    path = TRUTH / f"{table}.csv"
    failed = {row["id"] for row in csv.DictReader(path.open()) if row.get("oom") == "yes" or table == "oom"}
    unnamed = dict.fromkeys(SOFTWARE_COLUMNS, "")
    lines = [line if is_named else replace(line, row=line.row | unnamed) for line in read_lines(path)]
    rows = [row for row in map(measured, lines) if row.run and not row.faults and row.tier in "AB"]
    predictions = [p for p in predict(rows, shipped()) if p.fit_chance is not None]
    return [
        Outcome(
            filled=most_needed_bytes(1.0, p.fit_chance or 0.0, SPREAD if p.row.knows_software else UNNAMED_SPREAD),
            ran=p.row.id not in failed,
            peak=p.row.memory_gb / p.memory_gb if p.row.id not in failed else 0.0,
        )
        for p in predictions
        if (p.row.knows_recompute or p.row.id in failed)
    ]


def log_likelihood(outcomes: list[Outcome], spread: float) -> float:
    """The logarithm of the likelihood of the outcomes under a spread."""
    chances = ((fit_chance(outcome.filled, 1.0, spread), outcome.ran) for outcome in outcomes)
    return sum(math.log(max(1e-12, chance if ran else 1 - chance)) for chance, ran in chances)


def log_density(log_ratio: float, spread: float) -> float:
    """The logarithm of the density of Student's distribution with two degrees of freedom."""
    return -1.5 * math.log(2 + (log_ratio / spread) ** 2) - math.log(spread)


if __name__ == "__main__":
    main()
