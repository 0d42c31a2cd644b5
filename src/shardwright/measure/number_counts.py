"""The numbers behind predictions: fitted, set by hand, and of use to one family or table of runs.

A choice among a few numbers, as of bytes of a number type or of stages, is a fact as a flag is, and not a number. Those
that tests count operator by operator are apart: of this runtime, and of torch's own kernels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from shardwright.config import catalog
from shardwright.config.adapter_code import ADAPTER_CODE, AdapterCode
from shardwright.config.base import Spec
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.elementwise_kernels import ELEMENTWISE_KERNELS, ElementwiseKernels
from shardwright.config.product_modules import PRODUCT_MODULES
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.cost.calibration import device_of
from shardwright.cost.prediction_range import FACTS
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.runs import Measured

# Of calibrations those that no prediction of a step uses, or that another program derives from the fits.
DERIVED = {"low", "high", *(f"{fact}_range" for fact in FACTS)}
# Fields of a description of software that name kernels, and the facts of these that they take.
_KERNEL_FIELDS = ("norm", "residual", "activation", "rotary", "loss")
_TABLES = ("zero", "host")  # tables of such a description, which it inherits key by key

Numbers = dict[tuple[str, ...], int]  # how many numbers each place in the catalog has


def number_counts(rows: Sequence[Measured]) -> dict[str, int]:
    """Counts of the catalog's numbers: constants that are fitted, and to one family only; numbers set by hand, in
    calibrations, devices and descriptions of software; in descriptions of software that one family of `rows` has; those
    that are counted from the software itself; and those, fitted and by hand, that predictions of `rows` can use."""
    fitted = catalog.read_fitted()
    families: dict[str, set[str]] = {}
    for row in rows:
        if row.run:
            families.setdefault(_base(row.run), set()).add(row.family)
    software = _in_software()
    described = software | _in_kernels()
    counted = {place for place in described if _is_counted(place)}
    by_hand = _num_in(described, described.keys() - counted)
    constants = {place for place in _in_constants() if ".".join(place[1:]) not in fitted}
    used = numbers_used({row.run for row in rows if row.run})
    return {
        "fitted": len(fitted),
        "fitted_to_one_family": sum(len(moved) == 1 for moved in fitted.values()),
        "by_hand": len(constants) + by_hand,
        "by_hand_in_software": by_hand,
        "software_of_one_family": _num_in(
            software, (place for place in software if len(families.get(place[1], ())) == 1)
        ),
        "counted": _num_in(described, counted),
        "fitted_in_table": sum(("constant", *name.split(".")) in used for name in fitted),
        "by_hand_in_table": len(constants & used) + _num_in(described, (described.keys() & used) - counted),
    }


def _num_in(numbers: Mapping[tuple[str, ...], int], places: Iterable[tuple[str, ...]]) -> int:
    return sum(numbers[place] for place in places)


def _base(run: Run) -> str:
    """The name of a run's software without the changes of it."""
    return run.software.partition("+")[0]


def _in_software() -> Numbers:
    """Numbers of descriptions of software, by ("software", its name, the field)."""
    return {
        ("software", name, field): num
        for name in catalog.names("software")
        for field, num in _fields(catalog.read("software", name), SoftwareSpec).items()
    }


def _fields(described: Mapping[str, Any], spec: type[Spec]) -> dict[str, int]:
    """Numbers by field of a description, and of its tables by the field within."""
    num_by_field: dict[str, int] = {}
    for name, value in described.items():
        within = _described_by(spec.model_fields.get(name))
        if name in _TABLES:
            num_by_field |= {f"{name}.{key}": num for key, num in _fields(value, within).items()}
        else:
            num_by_field[name] = _num_numbers(value, within)
    return num_by_field


def _in_kernels() -> Numbers:
    """Numbers of whose kernels, code for adapters and modules descriptions name, by (the kind, the name, the fact)."""
    facts: list[tuple[str, ElementwiseKernels | AdapterCode]] = [
        *(("kernels", kernels) for kernels in ELEMENTWISE_KERNELS.values()),
        *(("adapters", code) for code in ADAPTER_CODE.values()),
    ]
    numbers: Numbers = {
        (kind, fact.name, field): _num_numbers(value)
        for kind, fact in facts
        for field, value in asdict(fact).items()
        if field != "place"
    }
    for modules in PRODUCT_MODULES.values():
        numbers["modules", modules.name, "launches"] = _num_numbers([*modules.launches, modules.collective])
    return numbers


def _is_counted(place: tuple[str, ...]) -> bool:
    """True for numbers that a test holds against the operators themselves."""
    kind, name, _ = place
    if kind == "software":
        return software_of(name).is_own
    if kind == "kernels":
        return ELEMENTWISE_KERNELS[name].is_counted
    return kind == "adapters" and ADAPTER_CODE[name].is_counted


def _in_constants() -> set[tuple[str, ...]]:
    """Constants of calibrations by ("constant", the file, the name), and of devices' own by ("device", ...)."""
    files = [name for name in catalog.names("calibrations") if name != "pessimistic"]
    own = {name: device_of(name).constants for name in catalog.names("devices")}
    return {
        ("constant", file, name)
        for file in files
        for name, value in catalog.read("calibrations", file).items()
        if isinstance(value, int | float) and name not in DERIVED
    } | {
        ("device", device, name)
        for device, constants in own.items()
        if constants
        for name in constants.model_fields_set
    }


def numbers_used(runs: set[Run]) -> set[tuple[str, ...]]:
    """Places whose numbers can move a prediction of these runs: of a constant the one that holds before others, and of
    a description of software those that its heir leaves."""
    used: set[tuple[str, ...]] = set()
    constants = _in_constants()
    for software, device, name in {(run.software, run.device, _base(run)) for run in runs}:
        used |= {("software", owner, field) for field, owner in _owners(name).items()}
        spec, entry = software_of(software), device_of(device)
        used |= {("kernels", getattr(spec, field), field) for field in _KERNEL_FIELDS}
        used |= {("adapters", spec.adapters, field) for field in ("of_input", "of_output", "kernels")}
        used.add(("modules", spec.modules, "launches"))
        for constant in CalibrationSpec.model_fields:
            files = [("device", entry.name), ("constant", entry.generation), ("constant", "common")]
            places = [place for kind, file in files if (place := (kind, file, constant)) in constants]
            used |= {*places[:1], *({("constant", spec.calibration, constant)} & constants)}
    return used


def _owners(software: str) -> dict[str, str]:
    """The software whose description says each field of this one's: itself or one that it is like."""
    described = catalog.read("software", software)
    inherited = _owners(described["like"]) if described.get("like") else {}
    return inherited | dict.fromkeys(_fields(described, SoftwareSpec), software)


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
