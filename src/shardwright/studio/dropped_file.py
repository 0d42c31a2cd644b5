"""A file that was dropped on the page, as a state: a config.json of Hugging Face, a job, or a job of another system.

Its text is all that is read: what it names on this machine stays closed.
"""

import tomllib
from pathlib import PurePath
from tempfile import TemporaryDirectory
from typing import Any

from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError, shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.hugging_face.config_json import CONFIG, read_model
from shardwright.config.job import JobSpec
from shardwright.config.toml_file import TOML_ERRORS
from shardwright.config.toml_text import value_text
from shardwright.interchange.imported import Asked
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SYSTEMS, job_of_texts, system_of
from shardwright.report.imported_text import imported_notes
from shardwright.studio.page_state import SECTIONS, SUBJECT, page_fields

_WITHOUT_DATA = ("data.path=python-stdlib",)  # else the data that a script names would be looked for


def dropped(name: str, text: str, system: str, cluster: AskedCluster) -> dict[str, Any]:
    """The state that a file describes, as {"state", "notes"}. `system` is empty for a config.json or a job. Raises
    PlanError."""
    name = PurePath(name.replace("\\", "/")).name or "file"
    if system:
        return _of_system(name, text, system, cluster)
    if name.endswith(".json"):
        return _of_model(text)
    if name.endswith(".toml"):
        return _of_job(name, text)
    raise PlanError(SUBJECT, [f"{shortened(name)} is no .json or .toml; choose the system whose script it is"])


def _of_model(text: str) -> dict[str, Any]:
    with TemporaryDirectory(prefix="shardwright-") as folder:
        path = PurePath(folder, CONFIG)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            fields = read_model(str(path))
        except PlanError as error:
            raise PlanError(CONFIG, [fault.replace(str(path), CONFIG) for fault in error.faults]) from None
    return {"state": _texts({"model": fields}), "notes": ""}


def _of_job(name: str, text: str) -> dict[str, Any]:
    try:
        fields = tomllib.loads(text)
    except TOML_ERRORS as error:
        raise PlanError(name, [f"it is no TOML: {error}; correct that line"]) from None
    texts = _texts({section: fields[section] for section in SECTIONS if isinstance(fields.get(section), dict)})
    left_out = [section for section in fields if section not in (*SECTIONS, "name")]
    return {"state": texts, "notes": f"Left out, since a page plans: {', '.join(left_out)}." if left_out else ""}


def _of_system(name: str, text: str, system_name: str, cluster: AskedCluster) -> dict[str, Any]:
    if system_name not in SYSTEMS:
        raise PlanError(SUBJECT, [f"{shortened(system_name)!r} is no system; there are {', '.join(SYSTEMS)}"])
    system = system_of(system_name, [name])
    asked = Asked(overrides=_WITHOUT_DATA, cluster=cluster)
    try:
        read_fields = system.read({name: text}, asked).fields
    except (ShellFault, RecursionError) as error:
        raise PlanError(name, [str(error)]) from None
    model = read_fields.get("model.name")
    if read_fields.get("model.weights") or (model and model not in catalog.names("models")):
        raise PlanError(
            name, [f"it names the model {shortened(str(model))!r}, and a page reads no file; run `shardwright import`"]
        )
    result = job_of_texts(system, {name: text}, asked, f"{system.title}, {name}")
    return {"state": job_texts(result.job), "notes": imported_notes(result, with_data=False)}


def job_texts(job: JobSpec) -> dict[str, str]:
    """The fields of a job that differ from their defaults, as the texts of a state."""
    texts = _texts(job.model_dump(exclude_defaults=True, mode="json", include=set(SECTIONS)))
    return texts | {"plan.dp": str(job.plan.dp)}


def _texts(fields: dict[str, Any]) -> dict[str, str]:
    """Nested fields as the texts of a state: those that a page may set, without names that the catalog lacks."""
    known = page_fields()
    texts = {
        key: value if isinstance(value, str) else value_text(value)
        for key, value in flat_keys(fields).items()
        if key in known and value != {}
    }
    kinds: dict[str, catalog.Kind] = {"model.name": "models", "cluster.name": "clusters"}
    return {key: text for key, text in texts.items() if key not in kinds or text in catalog.names(kinds[key])}
