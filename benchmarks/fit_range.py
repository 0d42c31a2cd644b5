"""How far off a prediction is where nothing was fitted: the range that four of five steps lie in.

    python benchmarks/fit_range.py                 # writes the range into catalog/calibrations/common.toml

Families of truth/runs.csv by constants that were fitted without them, and the tables to which nothing is fitted by the
shipped ones; families weigh alike. Descriptions of software were written by people who saw the errors of these tables,
so each run counts twice: as predicted by its description, and as if nothing said what ran it. A new source is between
both: of the first tables that nobody had seen, predictions with descriptions were no better than without.

The ends are those of runs of which no fact makes a prediction less sure (cost/prediction_range.py). The spread of a
fact is the least by which four of five runs with it lie in their range; that of an unknown device is of all runs,
predicted without the constants of their generation of devices, and that of unknown software of all runs, as if nothing
said what ran them. Run it after fit_costs.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log

import numpy as np
from fit_costs import HERE, generations_of, usable, weights_of, write

from shardwright.config import catalog
from shardwright.cost.calibration import left_out, left_out_generations, shipped
from shardwright.cost.prediction_range import FACTS, range_width, share_of_experts, unsure_facts
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.runs import Measured, measured
from shardwright.measure.measured_runs.score import percentile
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import step_time

# By table the constants that replace the shipped ones, by family.
TABLES = {"runs.csv": left_out(), "others.csv": {}, "playbook.csv": {}, "runs-2026.csv": {}}
OUTSIDE = 0.1  # share of usual runs below the range, and above it
HELD = 0.8  # share of the runs with a fact that their range holds
SPREADS = [step / 20 for step in range(100)]
ROUNDS = 3  # that spreads are fitted in turn: many runs have two facts


@dataclass(frozen=True)
class Miss:
    """A run of tier A: the logarithm of measured over predicted seconds, its weight, 1 a family, its facts, the share
    of its step that experts take, and True if it was predicted by the description of its software, and with the
    constants of its generation of devices."""

    table: str
    log_ratio: float
    weight: float
    facts: frozenset[str]
    expert_share: float
    is_described: bool
    knows_device: bool

    def is_held(self, low: float, high: float, spreads: Mapping[str, float]) -> bool:
        """True if the run lies in its range; `low` and `high` are logarithms of the ends of usual runs' range."""
        width = range_width({fact: spreads[fact] for fact in self.facts}, self.expert_share)
        return bool(low * width <= self.log_ratio <= high * width)


def misses(*, is_named: bool = True) -> Iterator[Miss]:
    """All runs, each predicted by the description of its software and as if there were none, and each of these with
    and without the constants of its generation of devices; if not `is_named`, only as if nothing said what ran them,
    which is a fact then, on known devices."""
    fitted = catalog.read_fitted()
    for table, without in TABLES.items():
        for is_described in (True, False) if is_named else (False,):
            rows = [row for row in usable(_rows(table, is_described)) if row.tier == "A"]
            for family, knows_device in product(sorted({row.family for row in rows}), (True, False)):
                if not (is_named or knows_device):
                    continue
                own = [row for row in rows if row.family == family]
                for row, seconds, share, weight in _family(own, without.get(family, {}), knows_device):
                    knows = row.knows_software if is_described else is_named
                    facts = {*unsure_facts(row.run, is_named=knows, fitted=fitted)}
                    facts |= set() if knows_device else {"device"}
                    ratio = log(row.step_s / seconds)
                    yield Miss(table, ratio, weight, frozenset(facts), share, is_described, knows_device)


def _family(
    rows: list[Measured], without: Mapping[str, float], knows_device: bool
) -> Iterator[tuple[Measured, float, float, float]]:
    """For each row of a family (row, predicted seconds of a step, the share of it that experts take, weight)."""
    generations = generations_of(rows)
    for generation in sorted(set(generations)):
        own = [row for row, of_row in zip(rows, generations, strict=True) if of_row == generation]
        constants = shipped() | dict(without) if knows_device else _without_generation(generation)
        weights = [weight for row, weight in zip(rows, weights_of(rows).tolist(), strict=True) if row in own]
        for row, (seconds, share), weight in zip(own, _predicted(own, constants), weights, strict=True):
            yield row, seconds, share, weight


def _without_generation(generation: str) -> dict[str, float]:
    """The constants without those of a generation of devices, and without its runs of truth/runs.csv."""
    others = {name: value for name, value in shipped().items() if not name.startswith(f"{generation}.")}
    return others | {
        name: value
        for name, value in left_out_generations().get(generation, {}).items()
        if not name.startswith(f"{generation}.")
    }


def _predicted(rows: list[Measured], constants: Mapping[str, float]) -> list[tuple[float, float]]:
    """For each row (seconds of a step, the share of it that experts take)."""
    results = [(0.0, 0.0)] * len(rows)
    for run, places in batches([row.run for row in rows]):
        time = step_time(run, constants)
        share = share_of_experts(run, sent_s=time.expert, computed_s=time.compute + time.again, total_s=time.total)
        for place, seconds, one_share in zip(places, time.total, share * np.ones(len(places)), strict=True):
            results[place] = float(seconds), float(one_share)
    return results


def _rows(table: str, is_described: bool) -> list[Measured]:
    lines = read_lines(HERE / "truth" / table)
    unnamed = {} if is_described else dict.fromkeys(SOFTWARE_COLUMNS, "")
    return [measured(replace(line, row=line.row | unnamed)) for line in lines]


def share_held(some: Iterable[Miss], low: float, high: float, spreads: Mapping[str, float]) -> float:
    """The share of runs that their ranges hold."""
    weights = [(miss.weight, miss.is_held(low, high, spreads)) for miss in some]
    return sum(weight for weight, is_held in weights if is_held) / sum(weight for weight, _ in weights)


def least_spread(fact: str, some: Iterable[Miss], low: float, high: float, spreads: Mapping[str, float]) -> float:
    """The least spread of a fact with which ranges hold enough runs with it, or as many as any spread can."""
    having = [miss for miss in some if fact in miss.facts]

    def held(spread: float) -> float:
        return round(min(HELD, share_held(having, low, high, {**spreads, fact: spread})), 6)

    return max(SPREADS, key=lambda spread: (held(spread), -spread))


def main() -> None:
    """Write the range, and print the share of runs of each table that it holds."""
    every, unnamed = list(misses()), list(misses(is_named=False))
    known, elsewhere = ([m for m in every if m.knows_device is knows] for knows in (True, False))
    usual = [miss for miss in known if not miss.facts]
    ratios, weights = [miss.log_ratio for miss in usual], [miss.weight for miss in usual]
    low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
    spreads = dict.fromkeys(FACTS, 0.0)
    for _ in range(ROUNDS):
        for fact in FACTS:
            some = {"software": unnamed, "device": elsewhere}.get(fact, known)
            spreads[fact] = least_spread(fact, some, low, high, spreads)
    constants = {name: value for name, value in shipped().items() if name.startswith("common.")}
    ends = {"common.low": exp(low), "common.high": exp(high)}
    write(constants | ends | {f"common.{fact}_range": spread for fact, spread in spreads.items()})
    print(f"{exp(low):.4g} to {exp(high):.4g} for {len(usual)} usual runs; spreads {spreads}")
    described = [miss for miss in known if miss.is_described]
    titles = {"all": every, "described": described, "device left out": elsewhere, "not named": unnamed}
    for title, some in titles.items():
        for table in TABLES:
            share = share_held([miss for miss in some if miss.table == table], low, high, spreads)
            print(f"  {title}, {table}: {share:.0%} in range")


if __name__ == "__main__":
    main()
