"""Every job of the catalog is planned to the end of its answer, with few layers on few devices: the fields that make a
job special, as a recipe of fp8 does, meet every bound and every price of a search."""

import pytest

import shardwright as sw
from shardwright.config import catalog
from shardwright.config.load import load_job

pytestmark = pytest.mark.long

# One way to run a layout, so that a search takes a second; state may go to the host.
KEEP = ["plan.recompute=full", "plan.cp=1", "plan.schedule=1f1b", "plan.microbatch_size=1", "plan.zero=1", "plan.tp=2"]


@pytest.mark.parametrize("name", catalog.names("jobs"))
def test_a_job_of_few_layers_is_planned(name: str) -> None:
    job = sw.load(name, "model.layers=4", "batch.global_batch_size=32", devices=16, device="h100-sxm")
    told = load_job(name)
    plans = job.plan(keep=KEEP)
    assert "Recommended: " in plans.text
    best = plans.best
    assert (best.plan.zero, best.plan.recompute, best.model.layers) == (1, "full", 4)
    assert (best.optimizer, best.precision.compute) == (told.optimizer, told.precision.compute)
