"""The spread of the log of needed over predicted bytes under which the measured plans that ran, and those that ran out
of memory, are likeliest: SPREAD of memory/fit_chance.py.

One plan in fifty is taken to run or to fail for a cause that the prediction knows nothing of: other programs on the
device, a setting that its source does not state.

    python benchmarks/fit_memory_spread.py
"""

import csv
import math
from pathlib import Path

from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.validate import predict
from shardwright.memory.fit_chance import fit_chance, most_needed_bytes

TRUTH = Path(__file__).parent / "truth"
TABLES = ("runs.csv", "playbook-memory.csv", "oom.csv")
UNRELATED = 0.02  # the share of plans whose outcome has another cause
SPREADS = [step / 200 for step in range(4, 61)]


def main() -> None:
    """Print the likeliest spread, and how many plans of each chance ran under it."""
    outcomes = [outcome for table in TABLES for outcome in measured_outcomes(TRUTH / table)]
    best = max(SPREADS, key=lambda spread: log_likelihood(outcomes, spread))
    print(f"{len(outcomes)} plans, {sum(ran for _, ran in outcomes)} of them ran; the likeliest spread is {best:.3f}")
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        among = [ran for ratio, ran in outcomes if low <= fit_chance(ratio, 1.0, best) < high]
        print(f"  chance {low:.2f} to {min(high, 1.0):.2f}: {sum(among)} of {len(among)} ran")


def measured_outcomes(table: Path) -> list[tuple[float, bool]]:
    """For each plan of a table: predicted over offered bytes, and True if it ran."""
    failed = {row["id"] for row in csv.DictReader(table.open()) if row.get("oom") == "yes" or table.stem == "oom"}
    predictions = predict([row for row in read_runs(table) if row.run and not row.faults], shipped())
    return [(filled_share(p.fit_chance), p.row.id not in failed) for p in predictions if p.fit_chance is not None]


def filled_share(chance: float) -> float:
    """Predicted over offered bytes of a plan that fits with this chance; ends that no spread tells apart are cut."""
    return most_needed_bytes(1.0, min(max(chance, 1e-9), 1 - 1e-9))


def log_likelihood(outcomes: list[tuple[float, bool]], spread: float) -> float:
    """The logarithm of the likelihood of the outcomes under a spread."""
    total = 0.0
    for ratio, ran in outcomes:
        chance = UNRELATED / 2 + (1 - UNRELATED) * fit_chance(ratio, 1.0, spread)
        total += math.log(chance if ran else 1 - chance)
    return total


if __name__ == "__main__":
    main()
