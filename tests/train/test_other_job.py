"""Checkpoints of earlier versions, whose jobs lack younger fields, are of the same model; what differs is told."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.train.checkpoint.manifest import Manifest
from shardwright.train.checkpoint.other_job import differences, refuse_other_model
from shardwright.train.checkpoint.storage import open_storage
from support.cases import small_job


def without_fields(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def manifest(stored: dict[str, Any]) -> Manifest:
    return Manifest(step=1, samples=1, optimizer_steps=1, job=stored, state={}, files=())


def of_an_earlier_version(job: JobSpec) -> dict[str, Any]:
    """The job as it was written before it had some of its fields, of sections of sections, too."""
    stored = job.model_dump(mode="json")
    model = without_fields(stored["model"], "adapter", "norm_bias", "head_bias")
    model["latent"] = without_fields(model["latent"], "norm_epsilon")
    return stored | {"model": model, "precision": without_fields(stored["precision"], "master")}


def test_fields_that_a_checkpoint_lacks_have_their_defaults(tmp_path: Path) -> None:
    job = small_job("deepseek")
    stored = of_an_earlier_version(job)
    refuse_other_model(manifest(stored), job, open_storage(str(tmp_path)), weights_alone=False)
    assert differences(stored, job) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"norm_bias": False}, "its model.norm_bias is true, and the job's false"),
        ({"latent": {"norm_epsilon": 1e-3}}, "its model.latent is .*norm_epsilon.*"),
    ],
)
def test_another_value_of_a_younger_field_is_another_model(changed: dict[str, Any], fault: str, tmp_path: Path) -> None:
    job = small_job("deepseek")
    latent = job.model.latent.model_copy(update=changed.get("latent", {}))
    other = job.model_copy(update={"model": job.model.model_copy(update=changed | {"latent": latent})})
    with pytest.raises(PlanError, match=fault):
        refuse_other_model(
            manifest(of_an_earlier_version(job)), other, open_storage(str(tmp_path)), weights_alone=False
        )
