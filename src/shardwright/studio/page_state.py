"""The state of the page, and its URL: a job of the catalog, a cluster, and fields in the language of --set.

A browser sends it, so it may name entries of the catalog and nothing else: no file of this machine is read for a page.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from shardwright.api.asked_job import AskedJob, planned
from shardwright.config import catalog, largest
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.field_texts import job_fields
from shardwright.config.job import JobSpec
from shardwright.config.load import job_to_plan, make_job
from shardwright.config.phrase import say
from shardwright.config.toml_file import TOML_ERRORS, parse_toml

SUBJECT = "this page"
SECTIONS = ("model", "cluster", "plan", "batch", "precision", "optimizer")
_WHOLE_KEYS = ("devices", "devices_per_node")
_CLUSTER_KEYS = (*_WHOLE_KEYS, "memory_gib", "device")
_MOST_KEYS, _MOST_TEXT = 300, 4000
# Fields that name an entry of the catalog, and would else be the path of a file; those that may only be a path.
_NAMES: dict[str, catalog.Kind] = {
    "model.name": "models",
    "cluster.name": "clusters",
    "cluster.device": "devices",
    "cluster.software": "software",
    "device": "devices",
}
_PATHS = ("model.weights", "model.adapter.weights", "cluster.parts")


@dataclass(frozen=True)
class PageState:
    """The texts of the page by key: `job`, `devices`, `device`, `devices_per_node`, `memory_gib` of a device where it
    is not that of its entry, and fields such as `plan.tp`."""

    texts: Mapping[str, str]

    def __hash__(self) -> int:
        return hash(frozenset(self.texts.items()))

    @classmethod
    def read(cls, sent: Any) -> "PageState":
        """The state that a browser sent. Raises PlanError with every fault."""
        if not isinstance(sent, dict) or len(sent) > _MOST_KEYS:
            fault = say("the state is no dictionary of at most {most} texts; reload the page", most=_MOST_KEYS)
            raise PlanError(SUBJECT, [fault])
        faults = [fault for key, text in sent.items() for fault in _text_faults(key, text)]
        if faults:
            raise PlanError(SUBJECT, faults)
        return cls(sent)

    @cached_property
    def asked(self) -> AskedJob:
        """The job that the state asks for, as the command line would. Raises PlanError."""
        numbers = {key: _whole(key, self.texts.get(key, "")) for key in _WHOLE_KEYS}
        memory_gib = _memory_gib(self.texts.get("memory_gib", ""))
        cluster = AskedCluster(device=self.texts.get("device", ""), memory_gib=memory_gib, **numbers)
        return AskedJob(
            self.texts.get("job") or {"name": self.texts.get("model.name") or "custom"}, self.overrides, cluster
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        """The fields, as --set takes them."""
        return tuple(f"{key}={text}" for key, text in self.texts.items() if "." in key)

    @property
    def kept(self) -> tuple[str, ...]:
        """The fields of the plan, as --keep of `plan` takes them."""
        return tuple(override for override in self.overrides if override.startswith("plan."))

    def without_plan(self) -> "PageState":
        """The state without what a search chooses."""
        return PageState(
            {
                key: text
                for key, text in self.texts.items()
                if not (key.startswith("plan.") or key == "precision.float8")
            }
        )

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of the job, nested, which nobody changes. Without plan.dp, replicas fill the cluster. Raises
        PlanError."""
        fields = self.asked.job_fields.fields
        if "plan.dp" in self.texts:
            return fields
        spec = job_to_plan(fields, self.asked.subject)
        shared, num_devices = spec.plan.world // spec.plan.dp, spec.cluster.num_devices
        if not num_devices or num_devices % shared:
            return fields
        return fields | {"plan": fields.get("plan", {}) | {"dp": num_devices // shared}}

    def job(self) -> JobSpec:
        """The checked job under the plan of the page. Raises PlanError with every fault."""
        subject = self.asked.subject
        return planned(subject, make_job(self.fields, subject))


def _memory_gib(text: str) -> float:
    """The GiB of a text, 0 for none. Raises PlanError."""
    try:
        gib = float(text or "0") if text.isascii() and "_" not in text else math.nan
    except ValueError:
        gib = math.nan
    least, most = largest.LEAST_MEMORY_GIB, largest.MEMORY_GIB
    if gib != 0 and not least <= gib <= most:
        fault = say(
            "memory_gib is {text}; use a number of GiB, {least:g} to {most:,.0f}",
            text=repr(shortened(text)),
            least=least,
            most=most,
        )
        raise PlanError(SUBJECT, [fault])
    return gib


def _whole(key: str, text: str) -> int:
    """The number of a text, 0 for none. Raises PlanError."""
    digits = text or "0"
    if not (digits.isascii() and digits.isdigit() and len(digits) < 9):
        raise PlanError(
            SUBJECT, [say("{key} is {text}, no whole number; use 64, say", key=key, text=repr(shortened(text)))]
        )
    return int(digits)


def _number_faults(key: str, text: str) -> list[str]:
    """Faults of a number of the cluster."""
    try:
        _ = _memory_gib(text) if key == "memory_gib" else _whole(key, text)
    except PlanError as error:
        return error.faults
    return []


def _text_faults(key: Any, text: Any) -> list[str]:
    """Faults of one key of the state and of its text."""
    if not isinstance(key, str) or not isinstance(text, str) or len(text) > _MOST_TEXT:
        return [say("{key} is no text of at most {most:,} characters", key=shortened(str(key)), most=_MOST_TEXT)]
    if not text.isprintable():  # a line break could begin another field
        return [say("{key} has characters that can't be printed; leave them out", key=shortened(key))]
    if key == "job":
        known = {*catalog.names("jobs"), *catalog.names("models")}
        return (
            []
            if not text or text in known
            else [say("{name} is no job or model of the catalog", name=repr(shortened(text)))]
        )
    if key in (*_WHOLE_KEYS, "memory_gib"):
        return _number_faults(key, text)
    if key in _PATHS or (key not in _CLUSTER_KEYS and key not in _field_names()):
        return [
            say(
                "{key} is no field that a page may set; run `shardwright estimate` with --set for it",
                key=shortened(key),
            )
        ]
    if key in _NAMES and text:
        return _name_faults(key, _NAMES[key], text)
    return []


def _name_faults(key: str, kind: catalog.Kind, text: str) -> list[str]:
    """Faults of a name: an entry of the catalog has it, whether or not the text is quoted."""
    try:
        value = parse_toml(f"value = {text}").get("value", text)
    except TOML_ERRORS:
        value = text
    entry = str(value).partition("+")[0] if kind == "software" else str(value)  # without changes of it
    if catalog.has(kind, entry) or (key == "cluster.device" and value == "unknown"):
        return []
    hint = catalog.known_hint(kind, str(value)) if "/" not in str(value) else say("a page reads no file")
    return [
        say(
            "{field} {name} is not in the catalog of {kind}; {hint}",
            field=key,
            name=repr(shortened(str(value))),
            kind=say(kind),
            hint=hint,
        )
    ]


@cache  # each key of each question is looked up
def _field_names() -> frozenset[str]:
    """The full names of the fields that a page may set."""
    return frozenset(page_fields())


def page_fields() -> dict[str, str]:
    """The meanings of the fields that a page may set, by their full names."""
    return {
        f"{section}.{row.partition(' = ')[0]}": meaning
        for section, rows in job_fields().items()
        if section.partition(".")[0] in SECTIONS
        for row, meaning in rows
        if f"{section}.{row.partition(' = ')[0]}" not in _PATHS
    }
