"""A job made of another system's files: its fields, and what was assumed, lost or left unread on the way."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError, error_text
from shardwright.config.cluster_facts import usual_divisor
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields
from shardwright.config.phrase import each, say
from shardwright.config.software import software_of
from shardwright.interchange.adapters_beside_experts import adapter_faults, targets_with_experts
from shardwright.interchange.carried_data import carried_data
from shardwright.interchange.known_settings import is_uncounted, is_usual, subjects
from shardwright.interchange.meaning import without_unread
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_marks import readable, unknown_names
from shardwright.interchange.unread_settings import unread_faults

IGNORED = "ignore"  # the word by which --set leaves a setting out


@dataclass(frozen=True)
class Asked:
    """The user's input beside the files: variables and arguments of scripts, fields of the job as --set has them, and
    the cluster."""

    variables: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    cluster: AskedCluster = NOTHING_ASKED
    arguments: tuple[str, ...] = ()  # of the first script
    left_out: frozenset[str] = frozenset()  # settings of the files that the job shall not have: --set NAME=ignore
    rivals: frozenset[str] = frozenset()  # paths of files that were found, of which the command may name another

    def without_left_out(self) -> "Asked":
        """Input whose `left_out` has the names that --set gives the word `ignore`, and whose other parts lack them."""
        by_name = self.fields
        names = {name for name, value in [*self.variables.items(), *by_name.items()] if value == IGNORED}
        return replace(
            self,
            variables={name: value for name, value in self.variables.items() if name not in names},
            overrides=tuple(text for text in self.overrides if text.partition("=")[0] not in names),
            left_out=frozenset(names),
        )

    @property
    def fields(self) -> Flat:
        """Fields that --set gives, by name; the files need not have them."""
        return {name: text for name, _, text in (assignment.partition("=") for assignment in self.overrides)}


@dataclass(frozen=True)
class ReadResult:
    """The result of reading a system's files: the fields of a job, and the settings that they were read from.

    The launcher starts `nodes` nodes with `devices_per_node` devices each; 0 means unknown. `software` is the entry of
    the catalog that prices the job.
    """

    fields: Flat
    settings: Settings
    software: str
    nodes: int = 0
    devices_per_node: int = 0
    known_in: tuple[str, ...] = ()  # systems of known.toml whose names its settings have


@dataclass(frozen=True)
class Imported:
    """A job, and a report about it: assumptions, settings that a job cannot express (`lost`), unknown settings, and
    settings that do not change a plan, by topic. `sources` maps the newest name of a setting to the settings that it
    was read from, as the system's users write them."""

    job: JobSpec  # paths of its data are absolute
    assumed: tuple[str, ...]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]
    without_effect: Mapping[str, tuple[str, ...]]
    names: frozenset[str] = frozenset()  # settings that the files have
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    of_data: tuple[str, ...] = ()  # data of the files that the job lacks, and why
    automatic: frozenset[str] = frozenset()  # settings that the files leave to another file, by the word "auto"


def split_sets(sets: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Values of --set, split into variables of scripts (NAME=VALUE) and fields of the job (section.field=VALUE)."""
    variables = {
        name: value
        for name, equals, value in (assignment.partition("=") for assignment in sets)
        if equals and "." not in name
    }
    return variables, tuple(
        assignment for assignment in sets if "." in assignment.partition("=")[0] or "=" not in assignment
    )


def _priced_as_own(result: ReadResult) -> ReadResult:
    """A job with adapters, priced as this runtime's: those of its own software are not described."""
    notes = [note for note in result.settings.notes if not note.startswith("priced as ")]
    result.settings.notes = [*notes, say("memory and time of adapters are those of this runtime")]
    return replace(result, software="shardwright")


def imported(result: ReadResult, asked: Asked, subject: str, name: str, folder: Path) -> Imported:
    """The checked job of files in a folder. PlanError lists every fault."""
    if "model.adapter.rank" in result.fields and not software_of(result.software).adapters:
        result = _priced_as_own(result)
    settings = result.settings
    faults = [_with_way_out(fault) for fault in (*_unknown_faults(settings), *settings.faults)]
    faults = [*unread_faults(settings, result.known_in, asked.left_out), *faults]
    fields = {"name": name} | nested_keys({key: value for key, value in result.fields.items() if value is not None})
    if faults:
        raise PlanError(subject, faults)
    try:
        fields["cluster"] = _cluster(result, asked, fields)
    except ValueError as error:
        raise PlanError(subject, [error_text(error)]) from None
    data = carried_data(settings, (folder, Path()), asked.fields)
    fields |= {"data": data.fields} if data.fields else {}
    try:
        job = job_of_fields(fields, list(asked.overrides), subject)
    except PlanError as error:  # a number of devices that was assumed may be why
        assumed = [readable(note) for note in settings.notes if "--devices" in note]
        raise PlanError(subject, [*error.faults, *assumed]) from None
    if faults := adapter_faults(job, settings, asked.fields):
        raise PlanError(subject, faults)
    if targets := targets_with_experts(job, settings, asked.fields):
        fields["model"]["adapter"]["targets"] = targets
        job = job_of_fields(fields, list(asked.overrides), subject)
    job = without_unread(job, asked.fields)
    by_subject, unknown, uncounted = _unread(result, asked)
    return Imported(
        job,
        tuple(map(readable, settings.notes)),
        (*map(readable, settings.lost), *uncounted),
        tuple(unknown),
        {topic: tuple(names) for topic, names in by_subject.items()},
        frozenset(settings.spelled.get(name, name) for name in settings.given),
        {
            name: {alias: readable(settings.setting_text(alias)) for alias in aliases}
            for name, aliases in settings.sources.items()
        },
        tuple(map(readable, data.remarks)),
        settings.automatic,
    )


def _with_way_out(fault: str) -> str:
    """A fault as readable text, with --set options for the unknown variables in it."""
    names = [] if "--set" in fault else unknown_names(fault)
    ways = " ".join(f"--set {shlex.quote(name)}=VALUE" for name in names)
    return say("{fault}, or say what it is: {ways}", fault=readable(fault), ways=ways) if ways else readable(fault)


def uncounted_note(settings: Sequence[str], topic: str) -> str:
    """The note on settings with an effect that the cost model does not count."""
    return say("{settings}: this changes {topic}, which is not counted", settings=tuple(settings), topic=topic)


def _unread(result: ReadResult, asked: Asked) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Settings that no table has read: names that change nothing, by topic; unknown settings; and a line for each topic
    with an effect that the cost model does not count, or that the user leaves out."""
    settings = result.settings
    topics = subjects(settings.given, *result.known_in)
    by_subject: dict[str, list[str]] = {}
    unknown, left_out = list[str](), list[str]()
    for key in settings.unread():
        topic = topics.get(key, "")
        if is_uncounted(topic) and is_usual(key, settings.given[key]):
            topic = say("what is taken anyway")
        text = readable(settings.setting_text(key))
        if settings.is_named(key, asked.left_out):
            left_out.append(say("{setting}: left out, as --set says", setting=text))
        elif topic:
            by_subject.setdefault(topic, []).append(text if is_uncounted(topic) else readable(settings.shown(key)))
        else:
            unknown.append(text)
    uncounted = [topic for topic in by_subject if is_uncounted(topic)]
    lines = [uncounted_note(by_subject.pop(topic), topic) for topic in uncounted]
    return by_subject, unknown, left_out + lines


def _unknown_faults(settings: Settings) -> list[str]:
    """One fault for all settings that have an effect and depend on variables that nobody has set."""
    dependants: dict[str, list[str]] = {}
    for setting, text in settings.needed.items():
        for variable in unknown_names(text):
            dependants[variable] = [*dict.fromkeys([*dependants.get(variable, []), settings.shown(setting)])]
    if not dependants:
        return []
    needs = [
        say("{settings} by {variable}", settings=tuple(settings_shown), variable=variable)
        for variable, settings_shown in dependants.items()
    ]
    ways = " ".join(f"--set {shlex.quote(variable)}=VALUE" for variable in dependants)
    return [
        say(
            "the script takes what it needs from its environment ({needs}); say it: {ways}",
            needs=each(needs),
            ways=ways,
        )
    ]


def _cluster(result: ReadResult, asked: Asked, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the cluster: from the launcher, and from the user if the user gives one."""
    cluster_fields: dict[str, Any] = {"name": "imported", "software": result.software}
    launched_devices = result.nodes * result.devices_per_node
    if launched_devices:
        cluster_fields |= {"devices_per_node": result.devices_per_node, "nodes": result.nodes}
    if asked.cluster == NOTHING_ASKED:
        return cluster_fields
    plan = fields["plan"]
    ranks = 1
    for axis in ("dp", "tp", "pp", "cp"):
        ranks *= plan.get(axis, 1)
    num_devices = asked.cluster.devices or ranks
    devices_per_node = asked.cluster.devices_per_node or (
        result.devices_per_node if num_devices % max(1, result.devices_per_node) == 0 else 0
    )
    if not devices_per_node and not asked.cluster.device:
        devices_per_node = usual_divisor(num_devices)
        result.settings.note(
            say("nodes of {devices} devices are taken (--devices-per-node N)", devices=devices_per_node)
        )
    full_cluster = replace(asked.cluster, devices=num_devices, devices_per_node=devices_per_node)
    return {"software": result.software} | full_cluster.over(cluster_fields)
