"""Files that were dropped on the page, as a state: a config.json of Hugging Face, a job, or a job of another system.

Their texts are all that is read: what they name on this machine stays closed.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.config_json import CONFIG
from shardwright.config.job import JobSpec
from shardwright.config.load import read_job
from shardwright.config.phrase import ENGLISH, in_language, say, with_changed_texts
from shardwright.config.toml_text import value_text
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.recognised import DATA, JOB, SCRIPTS, UnknownSystem, system_name_of
from shardwright.interchange.system import SOURCES, system_of
from shardwright.interchange.wrapped_commands import with_scripts
from shardwright.report.imported_text import note_groups
from shardwright.studio.controls import on_page
from shardwright.studio.page_state import SECTIONS, SUBJECT, page_fields

_MOST_FILES = 8
_WITHOUT_DATA = ("data.path=python-stdlib",)  # else the data that a script names would be looked for


def state_of_files(
    texts: Mapping[str, str], system: str, cluster: AskedCluster, language: str = ENGLISH
) -> dict[str, Any]:
    """The state that files describe, as {"state", "notes", "system"}; `texts` are theirs by name. Notes are groups
    {"heading", "lines", "folded"} in a language.

    `system` is empty if it is to be found from the files. Raises PlanError.
    """
    if not texts or len(texts) > _MOST_FILES:
        raise PlanError(SUBJECT, [say("{count} files; drop from 1 to {most}", count=len(texts), most=_MOST_FILES)])
    texts = {PurePath(name.replace("\\", "/")).name or "file": text for name, text in texts.items()}
    try:
        texts, _ = with_scripts(texts)
    except ShellFault as error:
        raise PlanError(next(iter(texts)), [error_text(error)]) from None
    name, text = next(iter(texts.items()))
    system = system or _system_of(texts)
    if system:
        return _of_system(texts, system, cluster, language)
    if name.endswith(".json"):
        return _of_model(text, cluster, language)
    if name.endswith(".toml"):
        return _of_job(name, text, language)
    raise PlanError(SUBJECT, [_unknown_fault(name)])


def _unknown_fault(name: str) -> str:
    return say(
        "{name} is no job, no config.json and no file of a system that is read; drop one, such as a script of "
        "Megatron-LM, or a configuration of DeepSpeed with its config.json",
        name=shortened(name),
    )


def _system_of(texts: Mapping[str, str]) -> str:
    """The system whose files these are; empty for a config.json, a job, and files of unknown suffixes. Raises PlanError
    for a configuration of a system that is not read."""
    scripts = [text for name, text in texts.items() if name.endswith(SCRIPTS)]
    configurations = {name: text for name, text in texts.items() if name.endswith(DATA)}
    for name, text in texts.items():
        if name.endswith((*SCRIPTS, *DATA, ".py")):
            try:
                system = system_name_of(name, text, *scripts, configurations=configurations)
            except UnknownSystem:
                raise PlanError(SUBJECT, [_unknown_fault(name)]) from None
            if system != JOB:
                return system
    return ""


def _of_model(text: str, cluster: AskedCluster, language: str) -> dict[str, Any]:
    """A config.json on the page's cluster, with the batch that is usual for such a model there."""
    with TemporaryDirectory(prefix="shardwright-") as folder:
        path = Path(folder, CONFIG)
        path.write_text(text, encoding="utf-8")
        try:
            asked = read_job(str(path), (), cluster)
        except PlanError as error:

            def named(text: str) -> str:
                return text.replace(str(path), CONFIG).replace(folder, CONFIG)

            raise PlanError(CONFIG, [with_changed_texts(fault, named) for fault in error.faults]) from None
    asked.fields.pop("cluster")
    texts = state_texts({section: asked.fields.get(section, {}) for section in SECTIONS}) | {
        "device": cluster.device,
        "devices": str(cluster.devices),
    }
    return {"state": texts, "notes": _notes(asked.filled_in, language=language), "system": ""}


def _notes(*lines: str, language: str, heading: str = "", folded: bool = False) -> list[dict[str, Any]]:
    """A group of notes as the page shows it; none without lines."""
    told = [on_page(line, language) for line in lines if line]
    return [{"heading": in_language(heading, language), "lines": told, "folded": folded}] if told else []


def _of_job(name: str, text: str, language: str) -> dict[str, Any]:
    fields = read_data(name, text)
    texts = state_texts({section: fields[section] for section in SECTIONS if isinstance(fields.get(section), dict)})
    left_out = [section for section in fields if section not in (*SECTIONS, "name")]
    return {
        "system": "",
        "state": texts,
        "notes": _notes(
            say("Left out, since a page plans: {fields}.", fields=tuple(left_out)) if left_out else "",
            language=language,
        ),
    }


def _of_system(texts: Mapping[str, str], system_name: str, cluster: AskedCluster, language: str) -> dict[str, Any]:
    if system_name not in SOURCES:
        fault = say("{name} is no system; there are {names}", name=repr(shortened(system_name)), names=SOURCES.names)
        raise PlanError(SUBJECT, [fault])
    system, names = system_of(system_name, texts), " ".join(texts)
    asked = Asked(overrides=_WITHOUT_DATA, cluster=cluster)
    try:
        read_fields = system.read(texts, asked).fields
    except (ShellFault, RecursionError) as error:
        raise PlanError(names, [error_text(error)]) from None
    model = read_fields.get("model.name")
    if read_fields.get("model.weights") or (model and model not in catalog.names("models")):
        raise PlanError(
            names,
            [
                say(
                    "it names the model {model}, and a page reads no file; run `shardwright import`",
                    model=repr(shortened(str(model))),
                )
            ],
        )
    try:
        result = job_of_texts(system, texts, asked, f"{system.title}, {names}")
    except PlanError as error:
        if not error.way_out and any("--device" in fault for fault in error.faults):
            way_out = say("Here --devices and --device are the controls below Cluster: set them, and drop again.")
            raise PlanError(error.subject, error.faults, way_out) from None
        raise
    notes = [
        shown
        for group in note_groups(result)
        for shown in _notes(*group.lines, language=language, heading=group.heading, folded=not group.of_effect)
    ]
    return {"state": job_texts(result.job), "notes": notes, "system": system.title}


def job_texts(job: JobSpec) -> dict[str, str]:
    """The fields of a job that differ from their defaults, as the texts of a state."""
    texts = state_texts(job.model_dump(exclude_defaults=True, mode="json", include=set(SECTIONS)))
    return texts | {"plan.dp": str(job.plan.dp)}


def state_texts(fields: dict[str, Any]) -> dict[str, str]:
    """Nested fields as the texts of a state: those that a page may set, without names that the catalog lacks."""
    known = page_fields()
    texts = {
        key: value if isinstance(value, str) else value_text(value)
        for key, value in flat_keys(fields).items()
        if key in known and value != {}
    }
    kinds: dict[str, catalog.Kind] = {"model.name": "models", "cluster.name": "clusters"}
    return {key: text for key, text in texts.items() if key not in kinds or text in catalog.names(kinds[key])}
