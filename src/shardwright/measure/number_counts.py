"""How many numbers stand behind predictions: fitted, set by hand, and of use to one family of runs only.

A choice among a few numbers, as of bytes of a number type or of stages, is a fact as a flag is, and not a number. Those
that tests count operator by operator are apart: of this runtime, and of torch's own kernels.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from shardwright.config import catalog
from shardwright.config.adapter_code import ADAPTER_CODE, AdapterCode
from shardwright.config.base import Spec
from shardwright.config.elementwise_kernels import ELEMENTWISE_KERNELS, ElementwiseKernels
from shardwright.config.product_modules import PRODUCT_MODULES
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.cost.prediction_range import FACTS
from shardwright.measure.measured_runs.runs import Measured

# Of calibrations those that no prediction of a step uses, or that another program derives from the fits.
_DERIVED = {"low", "high", *(f"{fact}_range" for fact in FACTS)}


def number_counts(rows: Sequence[Measured]) -> dict[str, int]:
    """Counts of the catalog's numbers: constants that are fitted, and to one family only; numbers set by hand, in
    calibrations and in descriptions of software; in descriptions of software that one family of `rows` has; and those
    that are counted from the software itself."""
    fitted = catalog.read_fitted()
    families: dict[str, set[str]] = {}
    for row in rows:
        if row.run:
            families.setdefault(row.run.software.partition("+")[0], set()).add(row.family)
    in_software = {
        name: _num_numbers(catalog.read("software", name), SoftwareSpec) for name in catalog.names("software")
    }
    own = {name for name in in_software if software_of(name).is_own}
    facts: list[ElementwiseKernels | AdapterCode] = [*ELEMENTWISE_KERNELS.values(), *ADAPTER_CODE.values()]
    in_facts = [(_num_numbers(asdict(fact) | {"place": ""}), fact.is_counted) for fact in facts]
    counted = sum(in_software[name] for name in own) + sum(num for num, is_counted in in_facts if is_counted)
    in_modules = sum(_num_numbers([*modules.launches, modules.collective]) for modules in PRODUCT_MODULES.values())
    described = sum(in_software.values()) + sum(num for num, _ in in_facts) + in_modules - counted
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
        "by_hand": in_calibrations + described,
        "by_hand_in_software": described,
        "software_of_one_family": sum(num for name, num in in_software.items() if len(families.get(name, ())) == 1),
        "counted": counted,
    }


def _num_numbers(value: Any, spec: Any = None) -> int:
    """Numbers in a value, and in the lists and tables of it; flags are none, nor are choices, by the fields of its
    `spec`."""
    if isinstance(value, dict):
        fields = spec.model_fields if isinstance(spec, type) and issubclass(spec, Spec) else {}
        return sum(_num_numbers(part, _described_by(fields.get(name))) for name, part in value.items())
    if _is_choice(spec):
        return 0
    if isinstance(value, list | tuple):
        return sum(map(_num_numbers, value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))


def _described_by(field: Any) -> Any:
    """The type of a field, without the None that it may be."""
    parts = [part for part in get_args(field.annotation) if part is not type(None)] if field else []
    return parts[0] if len(parts) == 1 else field and field.annotation


def _is_choice(described: Any) -> bool:
    """True for a type that is a list of all its values, or a tuple of such."""
    return get_origin(described) is Literal or any(get_origin(part) is Literal for part in get_args(described))
