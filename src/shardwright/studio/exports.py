"""A plan of the page as files: a job of this system, a job of another one, a timeline, an estimate."""

import json
from typing import Any

from shardwright.api.estimated import Estimated
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, say
from shardwright.interchange.exported import Lacking, exported
from shardwright.interchange.system import SYSTEMS
from shardwright.report.imported_text import exported_sentences, nearest_export
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.schedule_command import job_page, job_picture, job_trace
from shardwright.report.toml_files import job_toml
from shardwright.studio.controls import on_page
from shardwright.studio.page_state import SUBJECT

FORMATS = {
    "toml": say("Job (TOML)"),
    "json": say("Estimate (JSON)"),
    "text": say("Estimate (text)"),
    "svg": say("Timeline (SVG)"),
    "html": say("Timeline (HTML)"),
    "trace": say("Timeline (Perfetto trace)"),
}


def files(job: JobSpec, to: str, language: str = ENGLISH) -> dict[str, Any]:
    """{"files": texts by name, "notes" in a language} of a job in a format or for a system. Raises PlanError."""
    if to in SYSTEMS:
        try:
            result = exported(SYSTEMS[to], job)
        except Lacking as error:
            way_out = on_page(nearest_export(SYSTEMS[to], job, error), language)
            raise PlanError(error.subject, error.faults, way_out) from None
        notes = [on_page(note, language) for note in exported_sentences(result, SYSTEMS[to])]
        return {"files": result.files, "notes": " ".join(notes)}
    name = job.name
    if to == "toml":
        return _file(f"{name}.toml", job_toml(job))
    if to == "json":
        return _file(f"{name}-estimate.json", json.dumps(Estimated(job).to_dict(), indent=1))
    if to == "text":
        return _file(f"{name}-estimate.txt", Estimated(job).in_language(language))
    if to not in FORMATS:
        known = (*FORMATS, *SYSTEMS)
        raise PlanError(SUBJECT, [say("{name} is no format; there are {names}", name=repr(shortened(to)), names=known)])
    study = study_job(job, 0.0, 1)
    if to == "svg":
        return _file(f"{name}-timeline.svg", job_picture(study, language))
    if to == "html":
        return _file(f"{name}-timeline.html", job_page(study, language))
    return _file(f"{name}-trace.json", job_trace(study))


def _file(name: str, text: str) -> dict[str, Any]:
    return {"files": {name: text}, "notes": ""}
