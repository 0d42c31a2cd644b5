"""Read one entry of the catalog or one user's file, such as a device, and check it field by field."""

import json
from functools import lru_cache, reduce
from typing import Any, TypeVar

from pydantic import ValidationError

from shardwright.config import catalog
from shardwright.config.base import PlanError, Spec, error_text
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.field_texts import described
from shardwright.config.phrase import say

Entry = TypeVar("Entry", bound=Spec)
NO_CALIBRATION = "cpu"  # the generation of CPUs, whose efficiencies are measured where they are used


def read_entry(kind: catalog.Kind, name: str, spec: type[Entry]) -> Entry:
    """The entry `name` as a `spec`. KeyError if the catalog has none; PlanError with all faults of a file."""
    entry = _read(kind, name, spec) if catalog.is_file(name) else _shipped(kind, name, spec)
    assert isinstance(entry, spec)
    return entry


def _read(kind: catalog.Kind, name: str, spec: type[Spec]) -> Spec:
    try:
        fields = _with_inherited(kind, catalog.read(kind, name), spec)
        return _entry(json.dumps(fields, default=str), spec)
    except ValidationError as error:
        raise PlanError(name, described(error, spec)) from None
    except ValueError as error:
        raise PlanError(name, [error_text(error)]) from None


# Fields that no entry takes from the one it is like.
_OWN = {"name", "is_own", "is_usual", "title", "source", "frameworks", "since", "compiled", "usual"}


def _with_inherited(kind: catalog.Kind, fields: dict[str, Any], spec: type[Spec]) -> dict[str, Any]:
    """The fields of an entry, and of its tables, with those of the entry that it is like where it has none. ValueError
    if there is no such entry, or if it is like itself."""
    children, whole = [fields["name"]], dict(fields)
    while "like" in spec.model_fields and (parent := fields.get("like")):
        try:
            fields = catalog.read(kind, str(parent))
        except KeyError as error:
            raise ValueError(say("like: {fault}", fault=error.args[0])) from None
        if fields["name"] in children:
            raise ValueError(
                say("like: {chain}; let one of them stand by itself", chain=_chain([*children, fields["name"]]))
            )
        children.append(fields["name"])
        whole = _merged({name: value for name, value in fields.items() if name not in _OWN}, whole)
    return whole


def _merged(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """The fields of both, of tables key by key; where both have one, the child's."""
    both = {
        name: _merged(table, child[name])
        for name, table in parent.items()
        if isinstance(table, dict) and isinstance(child.get(name), dict)
    }
    return parent | child | both


def _chain(names: list[str]) -> str:
    """ "a is like b is like a"."""
    return reduce(lambda first, second: say("{first} is like {second}", first=first, second=second), names)


# Because a search checks thousands of plans for the same devices. A user's file may change meanwhile and is read anew.
_shipped = lru_cache(maxsize=512)(_read)


@lru_cache(maxsize=512)
def _entry(text: str, spec: type[Spec]) -> Spec:
    return spec.model_validate_json(text, strict=True)


def entry_faults(field: str, kind: catalog.Kind, name: str, spec: type[Spec]) -> list[str]:
    """Faults of the entry that a field of a job names."""
    if not catalog.is_file(name) and not catalog.has(kind, name):
        hint = catalog.known_hint(kind, name)
        return [
            say(
                "{field} {name} is not in the catalog of {kind}; {hint}",
                field=field,
                name=repr(name),
                kind=say(kind),
                hint=hint,
            )
        ]
    try:
        entry = read_entry(kind, name, spec)
    except PlanError as error:
        return [say("{field} {name}: {fault}", field=field, name=name, fault=fault) for fault in error.faults]
    calibrations = [(key, getattr(entry, key, "")) for key in ("generation", "calibration")]
    return [
        fault
        for key, calibration in calibrations
        if calibration not in ("", NO_CALIBRATION)
        for fault in entry_faults(f"{field} {name}: {key}", "calibrations", calibration, CalibrationSpec)
    ]
