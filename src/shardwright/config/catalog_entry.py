"""Read one entry of the catalog or one user's file, such as a device, and check it field by field."""

import json
from functools import lru_cache
from typing import TypeVar

from pydantic import ValidationError

from shardwright.config import catalog
from shardwright.config.base import PlanError, Spec
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.field_texts import described

Entry = TypeVar("Entry", bound=Spec)
NO_CALIBRATION = "cpu"  # the generation of CPUs, whose efficiencies are measured where they are used


def read_entry(kind: catalog.Kind, name: str, spec: type[Entry]) -> Entry:
    """The entry `name` as a `spec`. KeyError if the catalog has none; PlanError with all faults of a file."""
    entry = _read(kind, name, spec) if catalog.is_file(name) else _shipped(kind, name, spec)
    assert isinstance(entry, spec)
    return entry


def _read(kind: catalog.Kind, name: str, spec: type[Spec]) -> Spec:
    try:
        return _entry(json.dumps(catalog.read(kind, name), default=str), spec)
    except ValidationError as error:
        raise PlanError(name, described(error, spec)) from None
    except ValueError as error:
        raise PlanError(name, [str(error)]) from None


# Because a search checks thousands of plans for the same devices. A user's file may change meanwhile and is read anew.
_shipped = lru_cache(maxsize=512)(_read)


@lru_cache(maxsize=512)
def _entry(text: str, spec: type[Spec]) -> Spec:
    return spec.model_validate_json(text, strict=True)


def entry_faults(field: str, kind: catalog.Kind, name: str, spec: type[Spec]) -> list[str]:
    """Faults of the entry that a field of a job names."""
    if not catalog.is_file(name) and not catalog.has(kind, name):
        hint = catalog.did_you_mean(name, catalog.names(kind))
        return [f"{field} {name!r} is not in the catalog of {kind}; {hint}"]
    try:
        entry = read_entry(kind, name, spec)
    except PlanError as error:
        return [f"{field} {name}: {fault}" for fault in error.faults]
    calibrations = [(key, getattr(entry, key, "")) for key in ("generation", "calibration")]
    return [
        fault
        for key, calibration in calibrations
        if calibration not in ("", NO_CALIBRATION)
        for fault in entry_faults(f"{field} {name}: {key}", "calibrations", calibration, CalibrationSpec)
    ]
