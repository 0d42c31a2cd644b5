"""A checkpoint's job beside the one that goes on from it: is it of the same model, and what is another now? Torch is
not needed."""

import json
from typing import Any

from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.train.checkpoint.kept import in_order_to_load, kept_by, manifest_of
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, Manifest, folder_name
from shardwright.train.checkpoint.storage import Storage

# What may be another in a run that goes on: the rest of a job is told where it differs.
_OF_THE_RUN = ("name", "plan", "cluster", "run", "checkpoint", "health")
_NO_ARITHMETIC = ("name", "weights", "longest_sequence")  # of a model: what it is called and where it comes from
_WITH_WEIGHTS = ", with its weights by --from this run"
_GO_ON, _FROM = "begin anew with --fresh, or name another run.folder", "name a run of this model in --from"


def refuse_other_model(manifest: Manifest, job: JobSpec, storage: Storage, weights_alone: bool) -> None:
    """PlanError where a checkpoint is of another model. Where its weights alone are taken, samples may be longer or
    shorter than they were, unless each position has a vector of its own."""
    now, then = job.model.model_dump(mode="json"), manifest.job["model"]
    way_out = _FROM if weights_alone else _GO_ON
    free_of_weights = {*_NO_ARITHMETIC, *(["sequence"] if job.model.positions != "learned" else [])}
    free = free_of_weights if weights_alone else {*_NO_ARITHMETIC}
    other = {field: then.get(field) for field in now if then.get(field) != now[field] and field not in free}
    if other:
        raise PlanError(
            f"checkpoint {storage.root}/{folder_name(manifest.step)}",
            [
                f"its model.{field} is {_text(value)}, and the job's {_text(now[field])}; {way_out}"
                f"{_WITH_WEIGHTS if field in free_of_weights and not weights_alone else ''}"
                for field, value in other.items()
            ],
        )


def refuse_weights_from(job: JobSpec, run: str) -> None:
    """PlanError where a run has no weights to begin with, or those of another model, as far as its newest healthy
    checkpoint says."""
    storage, steps = kept_by(run, "train --from")
    try:
        refuse_other_model(manifest_of(storage, in_order_to_load(storage, steps)[0]), job, storage, weights_alone=True)
    except (BrokenCheckpointError, OSError):
        return  # older ones are looked at when it begins


def differences(then: dict[str, Any], job: JobSpec) -> list[str]:
    """A line for each field that is not what it was, of those that matter to what is learned."""
    now = job.model_dump(mode="json")
    found = [
        f"note: {section}.{field} is {_text(value)} from here on; it was {_text(then.get(section, {}).get(field))}"
        for section, fields in now.items()
        if section not in _OF_THE_RUN and isinstance(fields, dict)
        for field, value in fields.items()
        if (section, field) not in (("model", "name"), ("data", "begin_new"))
        and then.get(section, {}).get(field) != value
    ]
    seed = then.get("run", {}).get("seed")
    if seed != job.run.seed:
        found.append(
            f"note: run.seed is {job.run.seed} from here on; it was {_text(seed)}: samples come in another order, and "
            "some of those that were seen come again"
        )
    best, was = job.checkpoint.keep_best, then.get("checkpoint", {}).get("keep_best", "")
    if best != was:
        stays = "; what was best by that stays until you remove it" if was else ""
        found.append(f"note: checkpoint.keep_best is {_text(best)} from here on; it was {_text(was)}{stays}")
    return found


def _text(value: Any) -> str:
    """A value of a job, on one line."""
    return shortened(json.dumps(value), 200)
