"""Fit the constants of the cost model to the published runs, and again without each family and each generation.

    python benchmarks/fit_costs.py     # writes calibrations/*.toml, fitted.toml and left_out*.toml of the catalog
    python benchmarks/fit_costs.py --generations     # left_out_generations.toml alone, from the shipped constants

Maximum a posteriori by Gauss-Newton on the logarithms: each constant has a prior (its value in PRIORS, known to a
factor) and each run's residual is log(predicted / measured), with weights as benchmarks/truth/README.md scores them.
Residuals count by their absolute value, not its square, so that a few odd runs do not bend the constants of all.

After it run fit_range.py and pessimistic.py.
"""

import argparse
import json
import math
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.config.software import software_of
from shardwright.cost.calibration import device_of, shipped
from shardwright.measure.measured_runs.runs import Measured, read_runs
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import step_time

HERE = Path(__file__).parent
CATALOG = HERE.parent / "src/shardwright/config/catalog/calibrations"

# Every constant that is fitted: what it is before any run is seen, and the factor that one standard deviation is.
PRIORS = tomllib.loads((HERE / "fit_priors.toml").read_text())
ROBUST = 0.03  # residuals below this count by their square
SHARES = {"A": 1.0, "B": 0.3}
STRENGTH = 0.0005  # how much a prior counts beside all runs
# Families that are scored, and to which nothing is fitted: products alone on that machine of B200 reach 0.45 to 0.51 of
# the peak (SimuMax, configs/system/b200_bf16_ceperm.json), on four others 0.66 to 0.78 (truth/kernels.csv). Constants
# that all share would make up for one slow machine: seconds of a step were fitted at three times what they are.
UNFITTED = ("simumax",)
SLOPE = 1e-6  # relative changes of a step below this share of a constant's change are none
KINDS = {"left_out": "each family of runs", "left_out_generations": "the runs of each generation of devices"}
RENEWED = 4  # rounds with one Jacobian, which takes forty times as long as a round; families left out share it


@dataclass
class Fit:
    """Constants as logarithms, and how the logarithm of each row's predicted seconds changes with each of them."""

    x: np.ndarray
    jacobian: np.ndarray  # rows x constants

    @property
    def constants(self) -> dict[str, float]:
        """By name."""
        return {name: math.exp(value) for name, value in zip(sorted(PRIORS), self.x, strict=True)}


def fit(rows: list[Measured], start: Fit | None, at: np.ndarray, fixed: dict[str, float], rounds: int) -> Fit:
    """Constants that predict the rows best, from `at`, with the Jacobian of `start` if that is given."""
    names = sorted(PRIORS)
    weights = weights_of(rows) * np.array([row.family not in UNFITTED for row in rows])
    prior = np.array([math.log(PRIORS[name]["value"]) for name in names])
    spread = np.array([math.log(PRIORS[name]["factor"]) for name in names])
    generations = [
        ("common", device_of(row.run.device).generation, software_of(row.run.software).calibration) for row in rows
    ]
    measured_s = np.array([row.step_s for row in rows])

    def residuals(x: np.ndarray, which: np.ndarray) -> np.ndarray:
        constants = fixed | {name: math.exp(value) for name, value in zip(names, x, strict=True)}
        chosen = [row for row, is_in in zip(rows, which, strict=True) if is_in]
        return np.log(step_seconds(chosen, constants) / measured_s[which])

    def loss(errors: np.ndarray, x: np.ndarray) -> float:
        big = np.abs(errors)
        cost = np.where(big < ROBUST, errors**2 / (2 * ROBUST), big - ROBUST / 2)
        return float((weights * cost).sum() + STRENGTH * (((x - prior) / spread) ** 2).sum() / 2)

    def derivative(x: np.ndarray, errors: np.ndarray) -> np.ndarray:
        result = np.zeros((len(rows), len(names)))
        for column, name in enumerate(names):
            moved = x.copy()
            moved[column] += 0.01
            concerned = np.array([name.split(".")[0] in of for of in generations])
            if concerned.any():
                result[concerned, column] = (residuals(moved, concerned) - errors[concerned]) / 0.01
        return result

    everything = np.ones(len(rows), bool)
    x, errors = at, residuals(at, everything)
    best, damping, age = loss(errors, at), 1e-3, 0
    jacobian = start.jacobian if start else derivative(x, errors)
    for number in range(rounds):
        w = weights / np.maximum(np.abs(errors), ROBUST)
        a = jacobian.T @ (w[:, None] * jacobian) + np.diag(STRENGTH / spread**2)
        b = jacobian.T @ (w * errors) + STRENGTH * (x - prior) / spread**2
        gained = 0.0
        for _ in range(5):
            step = np.linalg.solve(a + damping * np.diag(np.diag(a)), b)
            moved = x - np.clip(step, -0.7, 0.7)
            result = residuals(moved, everything)
            if (now := loss(result, moved)) < best:
                gained, x, errors, best, damping = best - now, moved, result, now, damping / 8
                break
            damping = max(damping, 1e-3) * 8
        age += 1
        print(f"loss {best:.5f}, damping {damping:g}", flush=True)
        if gained < 1e-5 and (start or age == 1):
            break
        if not start and number + 1 < rounds and (gained < 1e-5 or age == RENEWED):
            jacobian, damping, age = derivative(x, errors), 1e-3, 0
    return Fit(x, jacobian)


def step_seconds(rows: list[Measured], constants: dict[str, float]) -> np.ndarray:
    """Predicted seconds of each row's step."""
    result = np.empty(len(rows))
    for run, places in batches([row.run for row in rows]):
        result[places] = step_time(run, constants).total
    return result


def weights_of(rows: list[Measured]) -> np.ndarray:
    """Weight 1 a plan group and equal weight a family; sum 1."""
    in_group = Counter((row.family, row.group) for row in rows)
    groups: dict[str, set[str]] = {}
    for row in rows:
        groups.setdefault(row.family, set()).add(row.group)
    weights = [SHARES[row.tier] / in_group[row.family, row.group] / len(groups[row.family]) for row in rows]
    return np.array(weights) / len(groups)


def usable(rows: list[Measured]) -> list[Measured]:
    """The rows that constants can be fitted to."""
    return [row for row in rows if row.run and row.step_s and row.is_latest and row.tier in SHARES and not row.faults]


def write(constants: dict[str, float]) -> None:
    """The calibration files, one a generation."""
    files: dict[str, dict[str, float]] = {}
    for name, value in constants.items():
        file, key = name.split(".", 1)
        files.setdefault(file, {})[key] = value
    for file, values in files.items():
        text = "# Written by benchmarks/fit_costs.py.\n"
        text += "".join(f"{key} = {value:.4g}\n" for key, value in sorted(values.items()))
        (CATALOG / f"{file}.toml").write_text(text)


def write_families(rows: list[Measured], jacobian: np.ndarray) -> None:
    """The families whose steps each constant changes."""
    lines = ["# Written by benchmarks/fit_costs.py: families of runs whose steps each fitted constant changes."]
    for name, column in zip(sorted(PRIORS), jacobian.T, strict=True):
        moved = {row.family for row, slope in zip(rows, column, strict=True) if abs(slope) > SLOPE}
        families = sorted(moved.difference(UNFITTED))
        lines.append(f'"{name}" = {json.dumps(families)}')
    (CATALOG.parent / "fitted.toml").write_text("\n".join(lines) + "\n")


def generations_of(rows: list[Measured]) -> list[str]:
    """The generation of each row's device."""
    return [device_of(row.run.device).generation for row in rows]


def write_left_out(
    file: str, rows: list[Measured], parts: list[str], best: Fit, fixed: dict[str, float], rounds: int
) -> None:
    """The constants that are fitted without each part of the rows; `parts` has the part that each row belongs to."""
    lines = [f"# Written by benchmarks/fit_costs.py: constants fitted without {KINDS[file]}.\n"]
    for part in sorted(set(parts)):
        is_other = np.array([name != part for name in parts])
        others = [row for row, keeps in zip(rows, is_other, strict=True) if keeps]
        left = fit(others, Fit(best.x, best.jacobian[is_other]), best.x, fixed, rounds).constants
        lines.append(f"\n[{part}]\n" + "".join(f'"{k}" = {v:.4g}\n' for k, v in sorted(left.items())))
    (CATALOG.parent / f"{file}.toml").write_text("".join(lines))


def main() -> None:
    """Fit, and without each family and each generation of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-folds", action="store_true")
    parser.add_argument("--resume", action="store_true", help="begin where the shipped constants are")
    parser.add_argument("--generations", action="store_true", help="leave out generations of devices alone")
    options = parser.parse_args()
    rows = usable(read_runs(HERE / "truth" / "runs.csv"))
    values = {name: entry["value"] for name, entry in PRIORS.items() if entry["factor"] == 1.0}
    for name in values:
        del PRIORS[name]
    start = {name: entry["value"] for name, entry in PRIORS.items()}
    if options.resume or options.generations:
        start |= {name: value for name, value in shipped().items() if name in PRIORS}
    rounds = 0 if options.generations else options.rounds
    best = fit(rows, None, np.array([math.log(start[name]) for name in sorted(PRIORS)]), values, rounds)
    if options.generations:
        write_left_out("left_out_generations", rows, generations_of(rows), best, values, options.rounds)
        return
    result = best.constants
    write(values | result)
    write_families(rows, best.jacobian)
    if options.no_folds:
        return
    write_left_out("left_out", rows, [row.family for row in rows], best, values, options.rounds)
    write_left_out("left_out_generations", rows, generations_of(rows), best, values, options.rounds)


if __name__ == "__main__":
    main()
