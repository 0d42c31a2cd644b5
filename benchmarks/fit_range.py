"""How far off a prediction is where nothing was fitted: the range that four of five steps lie in.

    python benchmarks/fit_range.py                 # writes the range into catalog/calibrations/common.toml

Families of truth/runs.csv by constants that were fitted without them, and the tables to which nothing is fitted by the
shipped ones; families weigh alike. The ends are those of runs of which no fact makes a prediction less sure
(cost/prediction_range.py). The spread of a fact is the least by which, in each table, three of four runs with it lie in
their range: tables are of different years, and what is planned is more like the newest. The spread of unknown software
is the least by which four of five of all runs lie there, predicted as if nothing said what ran them. Run it after
fit_costs.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from fit_costs import HERE, step_seconds, usable, weights_of, write

from shardwright.config import catalog
from shardwright.cost.calibration import left_out, shipped
from shardwright.cost.prediction_range import FACTS, unsure_facts
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.runs import Measured, measured
from shardwright.measure.measured_runs.score import percentile

# By table the constants that replace the shipped ones, by family.
TABLES = {"runs.csv": left_out(), "others.csv": {}, "playbook.csv": {}, "runs-2026.csv": {}}
OUTSIDE = 0.106  # share of usual runs below the range, and above it
HELD = 0.75  # share of the runs of a table with a fact that their range holds
HELD_BLIND = 0.8  # share of all runs that the range holds if nothing says what ran them
SPREADS = [step / 20 for step in range(100)]
ROUNDS = 3  # that spreads are fitted in turn: many runs have two facts


@dataclass(frozen=True)
class Miss:
    """A run of tier A: the logarithm of measured over predicted seconds, its weight, 1 a family, and its facts."""

    table: str
    log_ratio: float
    weight: float
    facts: frozenset[str]

    def is_held(self, low: float, high: float, spreads: Mapping[str, float]) -> bool:
        """True if the run lies in its range; `low` and `high` are logarithms of the ends of usual runs' range."""
        width = sqrt(1 + sum(spreads[fact] ** 2 for fact in self.facts))
        return low * width <= self.log_ratio <= high * width


def misses(*, is_named: bool = True) -> Iterator[Miss]:
    """All runs; if not `is_named`, runs whose rows have lost the columns of software."""
    fitted = catalog.read_fitted()
    for table, without in TABLES.items():
        rows = [row for row in usable(_rows(table, is_named)) if row.tier == "A"]
        for family in sorted({row.family for row in rows}):
            own = [row for row in rows if row.family == family]
            predicted_s = step_seconds(own, shipped() | without.get(family, {})).tolist()
            for row, seconds, weight in zip(own, predicted_s, weights_of(own).tolist(), strict=True):
                facts = unsure_facts(row.run, is_named=row.knows_software, fitted=fitted)
                yield Miss(table, log(row.step_s / seconds), weight, frozenset(facts))


def _rows(table: str, is_named: bool) -> list[Measured]:
    lines = read_lines(HERE / "truth" / table)
    unnamed = {} if is_named else dict.fromkeys(SOFTWARE_COLUMNS, "")
    return [measured(replace(line, row=line.row | unnamed)) for line in lines]


def share_held(some: Iterable[Miss], low: float, high: float, spreads: Mapping[str, float]) -> float:
    """The share of runs that their ranges hold."""
    weights = [(miss.weight, miss.is_held(low, high, spreads)) for miss in some]
    return sum(weight for weight, is_held in weights if is_held) / sum(weight for weight, _ in weights)


def least_spread(fact: str, some: Iterable[Miss], low: float, high: float, spreads: Mapping[str, float]) -> float:
    """The least spread of a fact with which ranges hold enough runs of each table, or as many as any spread can."""
    is_blind = fact == "software"
    enough = HELD_BLIND if is_blind else HELD
    tables: dict[str, list[Miss]] = defaultdict(list)
    for miss in some:
        if fact in miss.facts:
            tables["all" if is_blind else miss.table].append(miss)

    def held(spread: float) -> float:
        shares = (share_held(own, low, high, {**spreads, fact: spread}) for own in tables.values())
        return round(sum(min(enough, share) for share in shares), 6)

    return max(SPREADS, key=lambda spread: (held(spread), -spread))


def main() -> None:
    """Write the range, and print the share of runs of each table that it holds."""
    named, unnamed = list(misses()), list(misses(is_named=False))
    usual = [miss for miss in named if not miss.facts]
    ratios, weights = [miss.log_ratio for miss in usual], [miss.weight for miss in usual]
    low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
    spreads = dict.fromkeys(FACTS, 0.0)
    for _ in range(ROUNDS):
        for fact in FACTS:
            spreads[fact] = least_spread(fact, unnamed if fact == "software" else named, low, high, spreads)
    constants = {name: value for name, value in shipped().items() if name.startswith("common.")}
    ends = {"common.low": exp(low), "common.high": exp(high)}
    write(constants | ends | {f"common.{fact}_range": spread for fact, spread in spreads.items()})
    print(f"{exp(low):.4g} to {exp(high):.4g} for {len(usual)} usual runs; spreads {spreads}")
    for title, some in (("software named", named), ("not named", unnamed)):
        for table in TABLES:
            share = share_held([miss for miss in some if miss.table == table], low, high, spreads)
            print(f"  {title}, {table}: {share:.0%} in range")


if __name__ == "__main__":
    main()
