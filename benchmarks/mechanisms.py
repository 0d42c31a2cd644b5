"""Predictions of parts of a step against public measurements that show the part alone.

    python benchmarks/mechanisms.py                # prints a table a mechanism; rows are those of benchmarks/truth

Small models are runs with a hidden size up to 1,024. Weak scaling is the step on more devices over that on the fewest,
with the same work on each. The ends of a pipeline are the seconds of a step beside its microbatches, from steps with
the same plan and other batches, in microbatches. Routing is the step with natural routing over that with forced, of the
pairs in benchmarks/truth/routing.csv, which says what else differs; predicted is one run with the one and the other.
A run's family is left out of the fit of its constants (catalog/left_out.toml) where it is in the fit at all.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from fit_costs import HERE, step_seconds, usable

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.runs import Measured, read_runs

TABLES = ("runs.csv", "others.csv", "runs-2026.csv", "unseen-8.csv", "unseen-9.csv", "unseen-11.csv")
SMALL = 1024  # largest hidden size of a small model
SCALED = (8, 256)  # devices between which weak scaling is judged
BATCHES = 3  # other batches of one plan that tell its ends


@dataclass(frozen=True)
class Step:
    """A measured step and the seconds that are predicted for it."""

    row: Measured
    predicted_s: float

    @property
    def devices(self) -> int:
        """The number of devices."""
        return int(self.row.run.grid.world)


@dataclass(frozen=True)
class Part:
    """A measured and a predicted number of one mechanism."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error, positive where too much is predicted."""
        return self.predicted / self.measured - 1


def steps() -> list[Step]:
    """Every run that can be priced, of tiers A and B."""
    rows = [row for table in TABLES for row in usable(read_runs(HERE / "truth" / table))]
    by_family: dict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        by_family[row.family].append(row)
    constants = left_out()
    return [
        Step(row, seconds)
        for family, own in by_family.items()
        for row, seconds in zip(own, step_seconds(own, shipped() | constants.get(family, {})).tolist(), strict=True)
    ]


def small_models(some: Iterable[Step]) -> list[Part]:
    """Steps of small models."""
    return [
        Part(step.row.family, step.row.step_s, step.predicted_s)
        for step in some
        if step.row.tier == "A" and step.row.run.shape.hidden <= SMALL
    ]


def weak_scaling(some: Iterable[Step]) -> list[Part]:
    """Steps over the step on the fewest devices, of plans that differ in the replicas and their batch alone."""
    groups: dict[Hashable, list[Step]] = defaultdict(list)
    for step in some:
        if step.row.tier == "A" and SCALED[0] <= step.devices <= SCALED[1]:
            groups[_one_replica(step.row)].append(step)
    parts = []
    for group in groups.values():
        first, *others = sorted(group, key=lambda step: step.devices)
        parts += [
            Part(
                f"{step.row.family}, {first.devices} to {step.devices}",
                step.row.step_s / first.row.step_s,
                step.predicted_s / first.predicted_s,
            )
            for step in others
            if step.devices > first.devices
        ]
    return parts


def _one_replica(row: Measured) -> Hashable:
    """All of a run but its number of replicas."""
    grid = row.run.grid
    shared = replace(grid, dp=1, global_batch=grid.global_batch / grid.dp, zero_ranks=0)
    return row.publication, replace(row.run, grid=shared)


def pipeline_ends(some: Iterable[Step]) -> list[Part]:
    """Microbatches' time that a step takes beside its microbatches, of plans with other batches alone."""
    groups: dict[Hashable, list[Step]] = defaultdict(list)
    for step in some:
        grid = step.row.run.grid
        if grid.pp > 1:
            groups[step.row.publication, replace(step.row.run, grid=replace(grid, global_batch=1))].append(step)
    parts = []
    for group in groups.values():
        numbers = [float(step.row.run.grid.num_microbatches) for step in group]
        if len(set(numbers)) >= BATCHES:
            measured, predicted = (
                _ends(numbers, seconds)
                for seconds in ([step.row.step_s for step in group], [step.predicted_s for step in group])
            )
            name = f"{group[0].row.family}, {group[0].row.run.grid.schedule}, pp {group[0].row.run.grid.pp}"
            parts.append(Part(name, measured, predicted))
    return parts


def _ends(numbers: list[float], seconds: list[float]) -> float:
    """Where the line through steps by microbatches is at none, in microbatches."""
    slope, end = np.polyfit(numbers, seconds, 1)
    return float(end / slope)


def routing(some: Iterable[Step]) -> list[Part]:
    """Steps with natural routing over steps with forced routing."""
    by_id = {step.row.id: step for step in some}
    with (HERE / "truth" / "routing.csv").open(encoding="utf-8", newline="") as file:
        pairs = [(by_id[pair["natural"]], float(pair["forced_s"])) for pair in csv.DictReader(file)]
    forced_s = step_seconds([_forced(step.row) for step, _ in pairs], shipped()).tolist()
    return [
        Part(step.row.id, step.row.step_s / measured_s, step.predicted_s / predicted_s)
        for (step, measured_s), predicted_s in zip(pairs, forced_s, strict=True)
    ]


def _forced(row: Measured) -> Measured:
    """A run with forced routing in place of its own."""
    shape = row.run.shape
    assert shape.experts is not None, row.id
    return replace(row, run=replace(row.run, shape=replace(shape, experts=replace(shape.experts, routing="forced"))))


def main() -> None:
    """Print a table a mechanism."""
    every_step = steps()
    for title, parts in (
        ("small models", small_models(every_step)),
        ("weak scaling", weak_scaling(every_step)),
        ("a pipeline's ends", pipeline_ends(every_step)),
        ("natural over forced routing", routing(every_step)),
    ):
        errors = [part.error for part in parts]
        typical = math.nan if not errors else statistics.median(map(abs, errors))
        print(f"\n{title}: {len(parts)} numbers, median error {typical:.1%}, bias {statistics.mean(errors):+.1%}")
        names: dict[str, list[Part]] = defaultdict(list)
        for part in parts:
            names[part.name].append(part)
        for name, same in names.items():
            shown = ", ".join(f"{part.predicted:.3g} / {part.measured:.3g}" for part in same[:6])
            typical = statistics.median(abs(part.error) for part in same)
            print(f"  {name}: {len(same)}, median error {typical:.1%}; predicted / measured {shown}")


if __name__ == "__main__":
    main()
