"""How many numbers stand behind predictions: fitted, set by hand, and of use to one family of runs only."""

from collections.abc import Sequence
from typing import Any

from shardwright.config import catalog
from shardwright.cost.prediction_range import FACTS
from shardwright.measure.measured_runs.runs import Measured

# Of calibrations those that no prediction of a step uses, or that another program derives from the fits.
_DERIVED = {"low", "high", *(f"{fact}_range" for fact in FACTS)}


def number_counts(rows: Sequence[Measured]) -> dict[str, int]:
    """Counts of the catalog's numbers: constants that are fitted, and to one family only; numbers set by hand, in
    calibrations and in descriptions of software; and in descriptions of software that one family of `rows` has."""
    fitted = catalog.read_fitted()
    families: dict[str, set[str]] = {}
    for row in rows:
        if row.run:
            families.setdefault(row.run.software.partition("+")[0], set()).add(row.family)
    in_software = {name: _num_numbers(catalog.read("software", name)) for name in catalog.names("software")}
    in_calibrations = sum(
        1
        for file in catalog.names("calibrations")
        if file != "pessimistic"
        for name, value in catalog.read("calibrations", file).items()
        if isinstance(value, int | float) and name not in _DERIVED and f"{file}.{name}" not in fitted
    )
    return {
        "fitted": len(fitted),
        "fitted_to_one_family": sum(len(moved) == 1 for moved in fitted.values()),
        "by_hand": in_calibrations + sum(in_software.values()),
        "by_hand_in_software": sum(in_software.values()),
        "software_of_one_family": sum(num for name, num in in_software.items() if len(families.get(name, ())) == 1),
    }


def _num_numbers(value: Any) -> int:
    """Numbers in a value of a TOML file, and in the lists and tables of it; flags are none."""
    if isinstance(value, dict):
        return sum(map(_num_numbers, value.values()))
    if isinstance(value, list):
        return sum(map(_num_numbers, value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))
