"""Load a job: read its fields, override, resolve names, fill in usual values, and check."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shardwright.config import catalog
from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.checks.check import faults_without_plan, job_faults
from shardwright.config.cluster_facts import node_devices
from shardwright.config.field_texts import described
from shardwright.config.job import JobSpec
from shardwright.config.job_file import names_model, read_fields
from shardwright.config.model_job import with_usual
from shardwright.config.named_entries import resolve_names, take_tokenizer
from shardwright.config.optimizer import with_fitting_warmup
from shardwright.config.phrase import both, say
from shardwright.config.secret_addresses import password_faults
from shardwright.config.toml_file import TOML_ERRORS, parse_toml, value_faults

_NAMES_CLUSTER = ("cluster.name", "cluster.device")
_WORDS = re.compile(r"\s*\[((?:\s*[A-Za-z][\w-]*\s*,)*\s*[A-Za-z][\w-]*\s*)\]\s*")
_MOST_KEYS = 3  # in the path of a field
# The kind of a section's entries, and fields of a job's own that make it another than the entry that is named.
_DECISIVE: dict[str, tuple[catalog.Kind, tuple[str, ...]]] = {
    "model": ("models", ("layers", "hidden")),
    "cluster": ("clusters", ("device",)),
}


@dataclass(frozen=True)
class JobFields:
    """The fields of a job, nested as in a file. `is_model` if JOB names a model, not a job; `filled_in` is a text about
    the values that such a job has by default. `asked_plan` are the fields of the plan that overrides set, where the job
    itself has no plan: a half plan, whose rest is nobody's choice."""

    fields: dict[str, Any]
    is_model: bool = False
    filled_in: str = ""
    asked_plan: Mapping[str, Any] = field(default_factory=dict)


def load_job(job: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Load and check a job.

    `job` is the path of a TOML file or a catalog name; `overrides` are "section.field=value" strings.
    Raises PlanError with every fault found.
    """
    return make_job(read_job(job, overrides).fields, subject_of(job))


def read_job(
    job: str | Mapping[str, Any],
    overrides: Sequence[str],
    asked: AskedCluster = NOTHING_ASKED,
    run_tokens: float = 0.0,
) -> JobFields:
    """The fields of a job: read, on the cluster of `asked`, with overrides, with names resolved and usual values filled
    in, of which the steps of a model are those of `run_tokens`, if any. They are not checked together yet (`make_job`,
    `job_to_plan`). Raises PlanError."""
    subject, asked = subject_of(job), asked.with_node_of(overrides)
    try:
        fields = read_fields(job, subject)
    except PlanError as error:
        raise PlanError(subject, error.faults + _faults_beside(overrides, asked), error.way_out) from None
    own = {section: dict(values) for section, values in fields.items() if isinstance(values, dict)}
    # The cluster that options ask for is one of the named cluster or device, and other overrides hold on it.
    names = [override for override in overrides if override.partition("=")[0].strip() in _NAMES_CLUSTER]
    faults: list[str] = (
        _apply_overrides(fields, names) + _replace_cluster(fields, asked) + _apply_overrides(fields, overrides)
    )
    faults += _name_override_faults(fields, own, overrides) + _size_faults(fields, asked)
    is_empty = isinstance(job, str) and fields.keys() <= {"name"}
    fields = _resolved(fields, faults, subject)
    told = _fit_warmup(fields, overrides)
    if is_empty and not told:
        told = say("{job} sets no field, so defaults hold for all (`shardwright fields`)", job=str(job))
    plan = fields.get("plan")
    asked_plan = dict(plan) if isinstance(plan, dict) and not own.get("plan") else {}
    if not names_model(job):
        return JobFields(fields, filled_in=told, asked_plan=asked_plan)
    fields, note = _with_usual_values(fields, subject, run_tokens)
    filled_in = say("{note}; {other}", note=note, other=told) if note and told else note or told
    return JobFields(fields, is_model=True, filled_in=filled_in, asked_plan=asked_plan)


def _size_faults(fields: dict[str, Any], asked: AskedCluster) -> list[str]:
    """The fault of nodes that overrides set and that have other devices together than are asked for."""
    section = fields.get("cluster")
    if not asked.devices or not isinstance(section, dict):
        return []
    nodes, in_node = section.get("nodes"), section.get("devices_per_node")
    if not isinstance(nodes, int) or not isinstance(in_node, int) or nodes <= 0 or in_node <= 0:
        return []  # other checks tell of these
    if nodes * in_node == asked.devices:
        return []
    return [
        say(
            "cluster.nodes {nodes:,} x cluster.devices_per_node {in_node:,} are {product:,} devices, and --devices is "
            "{asked:,}; leave --devices out, or say --devices-per-node {in_node} in place of both",
            nodes=nodes,
            in_node=in_node,
            product=nodes * in_node,
            asked=asked.devices,
        )
    ]


def _faults_beside(overrides: Sequence[str], asked: AskedCluster) -> list[str]:
    """Faults of overrides and of the device that is asked for, which hold whatever the job is."""
    fields: dict[str, Any] = {}
    faults = _apply_overrides(fields, overrides)
    if asked.device:
        faults += _replace_cluster(fields, asked)
    return faults + (password_faults(fields) or resolve_names(fields) + validate_fields(fields)[1])


def job_of_fields(fields: dict[str, Any], overrides: Sequence[str], subject: str) -> JobSpec:
    """A job from fields nested as in a file, with overrides. Raises PlanError with every fault."""
    return make_job(_resolved(fields, _apply_overrides(fields, overrides), subject), subject)


def job_to_plan(fields: dict[str, Any], subject: str) -> JobSpec:
    """A job for which a plan is to be searched: all but its own plan is checked. Where the cluster says its nodes, and
    not how many devices one has, they are the usual ones of its device. Raises PlanError with every fault."""
    spec, faults = validate_fields(fields)
    cluster, faults = spec.cluster, faults or faults_without_plan(spec)
    if not faults and not cluster.num_devices and "nodes" in cluster.model_fields_set:
        usual = cluster.model_copy(update={"devices_per_node": node_devices(cluster)})
        spec = spec.model_copy(update={"cluster": usual})
        faults = faults_without_plan(spec)
    if faults:
        raise PlanError(subject, faults)
    return spec


def subject_of(job: str | Mapping[str, Any]) -> str:
    """The subject of messages about a job: its file, its name, or the name in its fields."""
    name = job if isinstance(job, str) else job.get("name", JobSpec.model_fields["name"].default)
    return say("job {name}", name=name or "''")


def make_job(fields: dict[str, Any], subject: str = "job") -> JobSpec:
    """Validate and check nested fields. Raises PlanError with every fault found."""
    job, faults = validate_fields(fields)
    faults = faults or job_faults(job)
    if faults:
        raise PlanError(subject, faults)
    return job


def validate_fields(fields: dict[str, Any]) -> tuple[JobSpec, list[str]]:
    """(the job, faults of single fields); the default job if there are faults."""
    if faults := value_faults(fields) or password_faults(fields):
        return JobSpec(), faults
    try:
        # Through JSON, because in JSON pydantic's strict mode accepts a list for a tuple and an int for a float.
        return JobSpec.model_validate_json(json.dumps(fields, default=str), strict=True), []
    except ValidationError as error:
        return JobSpec(), described(error, JobSpec)


def _name_override_faults(
    fields: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]
) -> list[str]:
    """Faults of overrides of a name, other than the job's own, that would change nothing: fields of the entry are still
    those that the job had of its `own`."""
    faults = list[str]()
    for override in overrides:
        path, _, name = override.partition("=")
        section, _, field = path.strip().partition(".")
        kind, decisive = _DECISIVE.get(section, ("models", ()))
        values = fields.get(section)
        own_values = own.get(section, {})
        if field != "name" or not isinstance(values, dict) or own_values.get("name") == name:
            continue
        kept = [key for key in decisive if key in own_values and values.get(key) == own_values[key]]
        if kept and name in catalog.names(kind):
            faults.append(
                say(
                    "--set {override}: the job has {fields} of its own, which hold before those of {name}; set them "
                    "too, or name another job",
                    override=shortened(override, 80),
                    fields=both([f"{section}.{field}" for field in kept]),
                    name=name,
                )
            )
    return faults


def _replace_cluster(fields: dict[str, Any], asked: AskedCluster) -> list[str]:
    """Replace the cluster in place by the cluster that is asked for. Returns faults."""
    section = fields.get("cluster", {})
    if asked == NOTHING_ASKED or not isinstance(section, dict):
        return []
    resolved = {"cluster": dict(section)}
    if faults := resolve_names(resolved):
        return faults
    try:
        fields["cluster"] = asked.over(resolved["cluster"])
    except ValueError as error:
        return [error_text(error)]
    return []


def _resolved(fields: dict[str, Any], faults: list[str], subject: str) -> dict[str, Any]:
    """The fields with names resolved. Raises PlanError if names have faults, or with the faults from before."""
    if secrets := password_faults(fields):  # first, because other faults would quote the passwords
        raise PlanError(subject, secrets)
    if faults := faults + resolve_names(fields):
        # Later faults would follow from an unknown name and confuse; faults of single fields hold anyway.
        raise PlanError(subject, faults + validate_fields(fields)[1])
    take_tokenizer(fields)
    return fields


def _apply_overrides(fields: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set each "a.b=value" in place. Returns faults."""
    return [fault for override in overrides for fault in _apply_override(fields, override)]


def _apply_override(fields: dict[str, Any], override: str) -> list[str]:
    """Set one "a.b=value" in place. The value is TOML, or else a string. Returns faults."""
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        return [
            say(
                "--set {override} is not of the form section.field=value, such as plan.tp=4",
                override=repr(shortened(override, 80)),
            )
        ]
    if len(keys) > _MOST_KEYS:
        return [
            say(
                "--set {override} names {count} sections within each other, and fields are at most {most} deep, such "
                "as model.moe.experts",
                override=repr(shortened(override, 80)),
                count=len(keys),
                most=_MOST_KEYS,
            )
        ]
    target = fields
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            return [
                say(
                    "--set {override}: {key} is a value, not a section; set it without what follows {key}",
                    override=repr(shortened(override, 80)),
                    key=key,
                )
            ]
    target[keys[-1]] = _override_value(text)
    return []


def _override_value(text: str) -> Any:
    """The value of an override: TOML, or a list of words such as [query,value], or else a string."""
    try:
        parsed = parse_toml(f"value = {text}")
    except TOML_ERRORS:
        parsed = {}
    if len(parsed) == 1:  # a line break in the text could begin another key
        return parsed["value"]
    words = _WORDS.fullmatch(text)
    return [word.strip() for word in words[1].split(",")] if words else text


def _fit_warmup(fields: dict[str, Any], overrides: Sequence[str]) -> str:
    """Shorten the warm-up in place if the user sets fewer steps, but not the warm-up. Returns a note about it."""
    section = fields.get("optimizer")
    if not isinstance(section, dict):
        return ""
    keys = {override.partition("=")[0].strip() for override in overrides}
    is_asked = "optimizer.warmup_steps" in keys or ("warmup_steps" in section and "optimizer.steps" not in keys)
    fields["optimizer"], note = with_fitting_warmup(section, is_asked)
    return note


def _with_usual_values(fields: dict[str, Any], subject: str, run_tokens: float) -> tuple[dict[str, Any], str]:
    """The fields of a job for a model with usual values, and a note on those that nobody stated."""
    spec = job_to_plan(fields, subject)
    cluster = spec.cluster
    if cluster.device == "unknown" and not cluster.parts:
        name = subject.removeprefix("job ")
        raise PlanError(
            subject,
            [
                say(
                    "{name} is a model, and a job is a model on a cluster: `shardwright plan {asked} --devices 64 "
                    "--device h100-sxm` finds its plans, and with --toml FILE writes a job; estimate, explain, "
                    "simulate, scale, layout, dryrun and export take --devices and --device too",
                    name=repr(spec.name),
                    asked=name,
                )
            ],
        )
    plan = dict(fields.get("plan", {}))
    shared = spec.plan.world // spec.plan.dp
    if plan and "dp" not in plan and cluster.num_devices % shared == 0:
        fields = fields | {"plan": plan | {"dp": max(1, cluster.num_devices // shared)}}
    if cluster.parts:
        return fields, ""
    return with_usual(fields, spec.model, cluster, spec.plan.world, run_tokens)
