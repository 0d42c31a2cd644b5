"""A job made of another system's files: its fields, and all that was assumed, lost or passed over on the way."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields
from shardwright.config.other_systems.carried_data import carried_data
from shardwright.config.other_systems.known_settings import is_uncounted, is_usual
from shardwright.config.other_systems.settings import Flat, Settings, plain_text
from shardwright.config.other_systems.shell_values import readable, unknown_names
from shardwright.config.usual_links import usual_divisor


@dataclass(frozen=True)
class Asked:
    """The question beside the files: variables of scripts, fields of the job (as --set has them), and the cluster."""

    variables: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    cluster: AskedCluster = NOTHING_ASKED

    @property
    def fields(self) -> Flat:
        """Names of the fields that are given, which files then need not say."""
        return {name: text for name, _, text in (one.partition("=") for one in self.overrides)}


@dataclass(frozen=True)
class Told:
    """The answer of a system's files: fields of ours, and the settings that could not be read. `nodes` of `each`
    devices are those that the launcher starts; 0 is not said. `software` is the entry of the catalog that prices it."""

    fields: Flat
    settings: Settings
    software: str
    nodes: int = 0
    each: int = 0
    without_effect: Mapping[str, str] = field(default_factory=dict)  # names of settings, and what they are about


@dataclass(frozen=True)
class Imported:
    """A job, and what has to be told of it: what was assumed, what has no place in it, what is not known, and the
    settings that change nothing of a plan, by what they are about. `sources` are, by the newest name of a setting, the
    settings that it was read from, as their users write them."""

    job: JobSpec  # paths of its data are whole
    assumed: tuple[str, ...]
    lost: tuple[str, ...]
    unknown: tuple[str, ...]
    without_effect: Mapping[str, tuple[str, ...]]
    names: frozenset[str] = frozenset()  # of the settings that the files have
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    of_data: tuple[str, ...] = ()  # what of the data is not in the job, and why


def split_sets(sets: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """--set NAME=VALUE for variables of a script, and --set section.field=VALUE for fields of the job."""
    variables = {
        name: value for name, equals, value in (one.partition("=") for one in sets) if equals and "." not in name
    }
    return variables, tuple(one for one in sets if "." in one.partition("=")[0] or "=" not in one)


def imported(told: Told, asked: Asked, subject: str, name: str, folder: Path) -> Imported:
    """The job of files in a folder, checked. PlanError lists every fault."""
    settings = told.settings
    faults = [_with_way_out(fault) for fault in (*_unknown_faults(settings), *settings.faults)]
    fields = {"name": name} | nested_keys({key: value for key, value in told.fields.items() if value is not None})
    if faults:
        raise PlanError(subject, faults)
    try:
        fields["cluster"] = _cluster(told, asked, fields)
    except ValueError as error:
        raise PlanError(subject, [str(error)]) from None
    data = carried_data(settings, (folder, Path()), asked.fields)
    fields |= {"data": data.fields} if data.fields else {}
    job = job_of_fields(fields, list(asked.overrides), subject)
    by_subject, unknown, uncounted = _unread(told)
    return Imported(
        job, tuple(map(readable, settings.notes)), (*map(readable, settings.lost), *uncounted), tuple(unknown),
        {about: tuple(names) for about, names in by_subject.items()},
        frozenset(settings.spelled.get(name, name) for name in settings.given),
        {name: {one: readable(settings.said(one)) for one in aliases} for name, aliases in settings.sources.items()},
        tuple(map(readable, data.remarks)),
    )  # fmt: skip


def _with_way_out(fault: str) -> str:
    """A fault for reading, and how to say what in it is not known."""
    names = [] if "--set" in fault else unknown_names(fault)
    ways = " ".join(f"--set {shlex.quote(name)}=VALUE" for name in names)
    return readable(fault) + (f", or say what it is: {ways}" if ways else "")


def _unread(told: Told) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Settings that nobody asked for: those that change nothing, by what they are about; those that are not known; and
    a line for what those change that is not counted."""
    settings = told.settings
    by_subject: dict[str, list[str]] = {}
    unknown = []
    for key in settings.unread():
        about = told.without_effect.get(key, "")
        if is_uncounted(about) and is_usual(key, settings.given[key]):
            about = "what is taken anyway"
        if about:
            text = settings.said(key) if is_uncounted(about) else settings.shown(key)
            by_subject.setdefault(about, []).append(readable(text))
        else:
            unknown.append(readable(settings.said(key)))
    uncounted = [about for about in by_subject if is_uncounted(about)]
    lines = [f"{', '.join(by_subject.pop(about))}: this changes {about}, which is not counted" for about in uncounted]
    return by_subject, unknown, lines


def _unknown_faults(settings: Settings) -> list[str]:
    """One fault for all settings that matter and depend on what nobody has set."""
    needing: dict[str, list[str]] = {}
    for key in settings.needed:
        for name in unknown_names(plain_text(settings.given.get(key))):
            needing[name] = [*dict.fromkeys([*needing.get(name, []), settings.shown(key)])]
    if not needing:
        return []
    what = "; ".join(f"{', '.join(keys)} by {name}" for name, keys in needing.items())
    ways = " ".join(f"--set {shlex.quote(name)}=VALUE" for name in needing)
    return [f"the script takes what it needs from its environment ({what}); say it: {ways}"]


def _cluster(told: Told, asked: Asked, fields: dict[str, Any]) -> dict[str, Any]:
    """The cluster that the launcher says, or that is asked for."""
    cluster_fields: dict[str, Any] = {"name": "imported", "software": told.software}
    world = told.nodes * told.each
    if world:
        cluster_fields |= {"devices_per_node": told.each, "nodes": told.nodes}
    if asked.cluster == NOTHING_ASKED:
        return cluster_fields
    plan = fields["plan"]
    ranks = 1
    for axis in ("dp", "tp", "pp", "cp"):
        ranks *= plan.get(axis, 1)
    count = asked.cluster.devices or ranks
    each = asked.cluster.devices_per_node or (told.each if count % max(1, told.each) == 0 else 0)
    if not each and not asked.cluster.device:
        each = usual_divisor(count)
        told.settings.note(f"nodes of {each} devices are taken (--devices-per-node N)")
    whole = AskedCluster(count, asked.cluster.device, each)
    return {"software": told.software} | whole.over(cluster_fields)
