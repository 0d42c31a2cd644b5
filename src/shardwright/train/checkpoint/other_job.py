"""Comparison of a checkpoint's job with the job that resumes from it: the same model, and which fields differ. Torch is
not needed."""

import json
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.train.checkpoint.base_weights import base_fault
from shardwright.train.checkpoint.kept import in_order_to_load, kept_by, manifest_of
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, Manifest, folder_name
from shardwright.train.checkpoint.storage import Storage

# Sections of a job that may differ without a note. A difference in another section is reported.
_OF_THE_RUN = ("name", "plan", "cluster", "run", "checkpoint", "health")
_NO_ARITHMETIC = ("name", "weights", "longest_sequence")  # fields of a model that do not change its arithmetic
_GO_ON, _FROM = say("begin anew with --fresh, or name another run.folder"), say("name a run of this model in --from")
_WITH_WEIGHTS = say("begin anew with --fresh, or name another run.folder, with its weights by --from this run")


def refuse_other_model(manifest: Manifest, job: JobSpec, storage: Storage, weights_alone: bool) -> None:
    """PlanError if a checkpoint is of another model, or its adapters belong to other weights. With `weights_alone` the
    length of samples may differ, unless the model has learned positions."""
    model = _of_arithmetic(job.model.model_dump(mode="json"))
    stored_model = _of_arithmetic(_with_defaults(manifest.job["model"], model, ModelSpec().model_dump(mode="json")))
    subject = say("checkpoint {name}", name=f"{storage.root}/{folder_name(manifest.step)}")
    way_out = _FROM if weights_alone else _GO_ON
    ignored_for_weights = {*_NO_ARITHMETIC, *(["sequence"] if job.model.positions != "learned" else [])}
    ignored = ignored_for_weights if weights_alone else {*_NO_ARITHMETIC}
    differing = {
        field: stored_model.get(field)
        for field in model
        if stored_model.get(field) != model[field] and field not in ignored
    }
    if differing:
        raise PlanError(
            subject,
            [
                say(
                    "its model.{field} is {value}, and the job's {wanted}; {way_out}",
                    field=field,
                    value=_text(value),
                    wanted=_text(model[field]),
                    way_out=_WITH_WEIGHTS if field in ignored_for_weights and not weights_alone else way_out,
                )
                for field, value in differing.items()
            ],
        )
    if fault := base_fault(manifest, job):
        raise PlanError(subject, [fault])


def _with_defaults(stored: dict[str, Any], present: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A stored section with the defaults of the fields that it lacks, which are younger than the checkpoint.

    The default of a field is what the program did before it had the field.
    """
    filled = {field: defaults[field] for field in present if field not in stored and field in defaults} | stored
    for field, value in filled.items():
        here, default = present.get(field), defaults.get(field)
        if isinstance(value, dict) and isinstance(here, dict) and isinstance(default, dict):
            filled[field] = _with_defaults(value, here, default)
    return filled


def _of_arithmetic(model: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model, without the folder that the values of its adapters began with."""
    return {**model, "adapter": {**model["adapter"], "weights": ""}}


def refuse_weights_from(job: JobSpec, run: str) -> None:
    """PlanError if a run has no checkpoint to take weights from, or if its newest healthy checkpoint is of another
    model."""
    storage, steps = kept_by(run, "train --from")
    try:
        refuse_other_model(manifest_of(storage, in_order_to_load(storage, steps)[0]), job, storage, weights_alone=True)
    except (BrokenCheckpointError, OSError):
        return  # the start of the run tries older checkpoints


def differences(stored: dict[str, Any], job: JobSpec) -> list[str]:
    """A line for each field that differs from the `stored` job, and that affects what the model learns or which
    checkpoints stay."""
    now, defaults = job.model_dump(mode="json"), JobSpec().model_dump(mode="json")
    stored = _with_defaults(stored, now, defaults)
    lines: list[str] = [
        say(
            "note: {section}.{field} is {new} from here on; it was {old}",
            section=section,
            field=field,
            new=_text(value),
            old=_text(stored.get(section, {}).get(field)),
        )
        for section, fields in now.items()
        if section not in _OF_THE_RUN and isinstance(fields, dict)
        for field, value in fields.items()
        if (section, field) not in (("model", "name"), ("data", "begin_new"))
        and stored.get(section, {}).get(field) != value
    ]
    seed = stored.get("run", {}).get("seed")
    if seed != job.run.seed:
        lines.append(
            say(
                "note: run.seed is {seed} from here on; it was {old}: samples come in another order, and some of "
                "those that were seen come again",
                seed=job.run.seed,
                old=_text(seed),
            )
        )
    keep_best, old_keep_best = job.checkpoint.keep_best, stored.get("checkpoint", {}).get("keep_best", "")
    if keep_best != old_keep_best:
        line = say(
            "note: checkpoint.keep_best is {new} from here on; it was {old}",
            new=_text(keep_best),
            old=_text(old_keep_best),
        )
        if old_keep_best:
            line = say("{line}; what was best by that stays until you remove it", line=line)
        lines.append(line)
    return lines


def _text(value: Any) -> str:
    """A value of a job as JSON, shortened."""
    return shortened(json.dumps(value), 200)
