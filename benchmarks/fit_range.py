"""How far off a prediction is: the range that four of five steps lie in.

    python benchmarks/fit_range.py     # writes the catalog's measured_runs.toml, and the range into common.toml

A run of truth/runs.csv or of the tables to which nothing is fitted is predicted as it is to the catalog, whose
constants and descriptions know its family; and as a new one, without the constants and the measured runs of its family.
So a range may be narrower for a run that is like a measured one (cost/known_runs.py): no rule is told which table it
prices. Families weigh alike. Descriptions of software were written by people who saw the errors of these tables, so
each new run counts twice: as predicted by its description, and as if nothing said what ran it. That is not enough: of
each of six tables that nobody had seen ranges told by such runs held fewer than four of five. So the spread of a run
like no measured one is told by the unseen tables alone, after the others, and is at least that of new runs.

The ends are those of runs as they are to the catalog of which no fact makes a prediction less sure
(cost/prediction_range.py). The spread of a fact is the least by which four of five runs with it lie in their range:
"unfitted", "experts" and "small" of runs as they are to the catalog, "unmeasured" of new ones and of runs that nobody
had seen when they were first predicted, as they are, that of an unknown device of the first and of new ones without the
constants of their generation of devices, that of unknown software of new ones as if nothing said what ran them, which
is a fact then, and "host" of the runs in HOSTED that keep optimizer state there. Run it after fit_costs.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import compress
from math import exp, log

import numpy as np
from fit_costs import CATALOG, HERE, UNFITTED, generations_of, usable, weights_of, write

from shardwright.cost.calibration import device_of, left_out, left_out_generations, shipped
from shardwright.cost.known_runs import KnownRuns, unlike
from shardwright.cost.prediction_range import FACTS, families_by_constant, range_width, share_of_experts, unsure_facts
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.runs import Measured, measured
from shardwright.measure.measured_runs.score import percentile
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import step_time

# By table the constants that replace the shipped ones, by family.
TABLES = {"runs.csv": left_out(), "others.csv": {}, "playbook.csv": {}, "runs-2026.csv": {}}
HOSTED = ("unseen-3.csv", "offload.csv")
# Runs of sources that no table had, predicted once before anything was mended by them. The last such table tells
# nothing here: it shows what the range holds of runs by which it was not told.
UNSEEN = tuple(f"unseen{number}.csv" for number in ("", "-2", "-3", "-4", "-5", "-6"))
SHOWN = "unseen-7.csv"
OUTSIDE = 0.1  # share of usual runs below the range, and above it
HELD = 0.8  # share of the runs with a fact that their range holds
SPREADS = [step / 20 for step in range(600)]
ROUNDS = 3  # that spreads are fitted in turn: many runs have two facts
MEASURED = CATALOG.parent / "measured_runs.toml"


@dataclass(frozen=True)
class View:
    """The facts that are known of a run: its family's measurements, the description of its software, the constants of
    its generation of devices; and whether it is told that nothing says what ran it."""

    family: bool = True
    software: bool = True
    device: bool = True
    tells_unnamed: bool = False


OWN = View()
NEW = (View(family=False), View(family=False, software=False))
ELSEWHERE = tuple(replace(view, device=False) for view in NEW)
UNNAMED = View(family=False, software=False, tells_unnamed=True)


@dataclass(frozen=True)
class Miss:
    """A run: the logarithm of measured over predicted seconds, its weight, 1 a family, the share by which each fact
    makes its prediction less sure, and what was known of it."""

    table: str
    log_ratio: float
    weight: float
    facts: Mapping[str, float]
    view: View

    def is_held(self, low: float, high: float, spreads: Mapping[str, float]) -> bool:
        """True if the run lies in its range; `low` and `high` are logarithms of the ends of usual runs' range."""
        width = range_width(spreads, self.facts)
        return bool(low * width <= self.log_ratio <= high * width)


def misses(views: Iterable[View] = (OWN, *NEW, *ELSEWHERE)) -> Iterator[Miss]:
    """All runs of tier A, as they are predicted by what each view has of them."""
    for view in views:
        for table, without in TABLES.items():
            yield from _of_table(table, view, without)


def unseen_misses() -> Iterator[Miss]:
    """All runs of tier A of the tables that nobody had seen, as they are to the catalog."""
    for table in (*UNSEEN, SHOWN):
        yield from _of_table(table, OWN, {})


def hosted_misses() -> Iterator[Miss]:
    """The runs with optimizer state in host memory, as they are predicted where nobody has seen them."""
    for table in HOSTED:
        yield from _of_table(table, View(family=False), {}, tiers="AB", is_hosted=True)


def _of_table(
    table: str, view: View, without: Mapping[str, Mapping[str, float]], *, tiers: str = "A", is_hosted: bool = False
) -> Iterator[Miss]:
    known = measured_runs()
    rows = [row for row in usable(_rows(table, view.software)) if row.tier in tiers and row.run]
    rows = [row for row in rows if not is_hosted or row.run.grid.offload_optimizer]
    for family in sorted({row.family for row in rows}):
        own = [row for row in rows if row.family == family]
        constants = {} if view.family else without.get(family, {})
        for row, price, weight in _family(own, constants, view.device):
            facts = _facts(row, price, view, known)
            yield Miss(table, log(row.step_s / price.seconds), weight, facts, view)


def _facts(row: Measured, price: "Price", view: View, known: tuple[KnownRuns, ...]) -> dict[str, float]:
    """The facts of a run that make its prediction less sure, each with its share."""
    knows = row.knows_software if view.software else not view.tells_unnamed
    facts = dict.fromkeys(unsure_facts(row.run, is_named=knows, fitted=families_by_constant()), 1.0)
    if "experts" in facts:
        facts["experts"] = price.expert_share
    left = frozenset() if view.family else frozenset({row.family})
    if not view.device:
        left |= {device_of(row.run.device).generation}
        facts["device"] = 1.0
    is_named = view.software and row.knows_software
    unfitted, unmeasured = unlike(row.run, left, known) if is_named else (0.0, 1.0)
    facts |= {"unfitted": float(unfitted), "unmeasured": float(unmeasured), "host": price.host_share}
    return {fact: share for fact, share in facts.items() if share}


@dataclass(frozen=True)
class Price:
    """The predicted seconds of a step, and the shares of it that experts take and work on the host."""

    seconds: float
    expert_share: float
    host_share: float


def _family(
    rows: list[Measured], without: Mapping[str, float], knows_device: bool
) -> Iterator[tuple[Measured, Price, float]]:
    """For each row of a family (row, its price, weight)."""
    generations = generations_of(rows)
    for generation in sorted(set(generations)):
        is_own = [of_row == generation for of_row in generations]
        own, weights = (list(compress(each, is_own)) for each in (rows, weights_of(rows).tolist()))
        constants = shipped() | dict(without) if knows_device else _without_generation(generation)
        prices = _predicted(tuple(row.run for row in own), tuple(constants.items()))
        yield from zip(own, prices, weights, strict=True)


def _without_generation(generation: str) -> dict[str, float]:
    """The constants without those of a generation of devices, and without its runs of truth/runs.csv."""
    others = {name: value for name, value in shipped().items() if not name.startswith(f"{generation}.")}
    return others | {
        name: value
        for name, value in left_out_generations().get(generation, {}).items()
        if not name.startswith(f"{generation}.")
    }


@cache  # views that differ in the measured runs that they know, and not in constants, price a run alike
def _predicted(runs: tuple[Run, ...], constants: tuple[tuple[str, float], ...]) -> list[Price]:
    """The price of each run under constants, given as pairs of a name and a value."""
    results = [Price(0.0, 0.0, 0.0)] * len(runs)
    for run, places in batches(runs):
        time = step_time(run, dict(constants))
        share = share_of_experts(run, sent_s=time.expert, computed_s=time.compute + time.again, total_s=time.total)
        each = np.ones(len(places))
        columns = (time.total * each, share * each, time.host_share * each)
        for place, numbers in zip(places, zip(*columns, strict=True), strict=True):
            results[place] = Price(*map(float, numbers))
    return results


@cache
def measured_runs() -> tuple[KnownRuns, ...]:
    """The runs of TABLES by what a prediction compares: of tier A, and those that constants are fitted to."""
    kinds: dict[tuple[str, bool, str, str, str], set[tuple[float, int]]] = {}
    for table, without in TABLES.items():
        for row in usable(_rows(table, True)):
            if row.tier == "A" and row.run and row.knows_software:
                run, is_fitted = row.run, bool(without) and row.family not in UNFITTED
                software, generation = run.software.partition("+")[0], device_of(run.device).generation
                key = row.family, is_fitted, software, generation, run.grid.precision
                billions = float(f"{run.shape.parameters / 1e9:.4g}")
                kinds.setdefault(key, set()).add((billions, int(run.grid.world)))
    return tuple(KnownRuns(*key, sizes=tuple(sorted(sizes))) for key, sizes in sorted(kinds.items()))


def text_of(known: Iterable[KnownRuns]) -> str:
    """The catalog's file of measured runs."""
    lines, family = ["# Written by benchmarks/fit_range.py."], ""
    for runs in sorted(known, key=lambda runs: (not runs.is_fitted, runs.family)):
        if runs.family != family:
            family = runs.family
            lines += ["", f"[{'fitted' if runs.is_fitted else 'measured'}.{family}]"]
        sizes = ", ".join(f"[{size:g}, {devices}]" for size, devices in runs.sizes)
        lines.append(f'"{runs.software} {runs.generation} {runs.number}" = [{sizes}]')
    return "\n".join(lines) + "\n"


@cache
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
    """Write the range and the measured runs, and print the share of runs of each table that the range holds."""
    MEASURED.write_text(text_of(measured_runs()))
    every = [*misses(), *misses([UNNAMED]), *hosted_misses()]

    def seen(*views: View) -> list[Miss]:
        return [miss for miss in every if miss.view in views and miss.table in TABLES]

    usual = [miss for miss in seen(OWN) if miss.facts.keys() <= {"host"}]  # of which every step has a little
    ratios, weights = [miss.log_ratio for miss in usual], [miss.weight for miss in usual]
    low, high = percentile(ratios, weights, OUTSIDE), percentile(ratios, weights, 1 - OUTSIDE)
    told_by = dict.fromkeys(FACTS, seen(OWN))
    unseen = list(unseen_misses())
    told_by |= {
        "unmeasured": seen(*NEW),
        "device": seen(OWN, *ELSEWHERE),
        "software": seen(UNNAMED),
    }
    told_by["host"] = [miss for miss in every if miss.table in HOSTED]
    spreads = dict.fromkeys(FACTS, 0.0)
    for _ in range(ROUNDS):
        for fact in FACTS:
            spreads[fact] = least_spread(fact, told_by[fact], low, high, spreads)
    nobody_saw = [miss for miss in unseen if miss.table != SHOWN]
    spreads["unmeasured"] = max(spreads["unmeasured"], least_spread("unmeasured", nobody_saw, low, high, spreads))
    constants = {name: value for name, value in shipped().items() if name.startswith("common.")}
    ends = {"common.low": exp(low), "common.high": exp(high)}
    write(constants | ends | {f"common.{fact}_range": spread for fact, spread in spreads.items()})
    print(f"{exp(low):.4g} to {exp(high):.4g} for {len(usual)} usual runs; spreads {spreads}")
    held = partial(share_held, low=low, high=high, spreads=spreads)
    titles = {"as they are": (OWN,), "new": NEW, "device left out": ELSEWHERE, "not named": (UNNAMED,)}
    for title, views in titles.items():
        for table in TABLES:
            print(f"  {title}, {table}: {held([miss for miss in seen(*views) if miss.table == table]):.0%} in range")
    for table in (*UNSEEN, SHOWN):
        print(f"  as they are, {table}: {held([miss for miss in unseen if miss.table == table]):.0%} in range")
    for table in HOSTED:
        print(f"  state on the host, {table}: {held([miss for miss in every if miss.table == table]):.0%} in range")


if __name__ == "__main__":
    main()
