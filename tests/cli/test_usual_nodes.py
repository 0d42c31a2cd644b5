"""A job that says its nodes and its device, and not how many devices a node has, is planned on the usual nodes."""

from pathlib import Path

import pytest

from shardwright.api.asked_job import AskedJob
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError

pytestmark = pytest.mark.usefixtures("searched_once")

JOB = """
model.name = "tiny-llama"
cluster.device = "{device}"
cluster.nodes = 2
batch.global_batch_size = 32
"""


def job_in(folder: Path, device: str) -> AskedJob:
    file = folder / "job.toml"
    file.write_text(JOB.format(device=device), encoding="utf-8")
    return AskedJob(str(file))


@pytest.mark.parametrize(("device", "devices"), [("h100-sxm", 16), ("rtx-4090", 0)])
def test_nodes_have_their_usual_devices(tmp_path: Path, device: str, devices: int) -> None:
    """A device without fast links has no usual node."""
    assert job_in(tmp_path, device).to_plan().job.cluster.num_devices == devices


def test_an_unknown_device_with_nodes_is_a_fault(tmp_path: Path) -> None:
    """Its usual node is not looked up before its name is checked."""
    with pytest.raises(PlanError, match="device 'h1000' is not in the catalog"):
        job_in(tmp_path, "h1000").to_plan()


def test_nodes_without_a_plan_get_the_best_one_for_all_devices(tmp_path: Path) -> None:
    spec, notes = job_in(tmp_path, "h100-sxm").to_predict()
    assert spec.plan.world == spec.cluster.num_devices == 16
    assert any("the plan is what `plan` recommends" in note for note in notes)


def test_half_a_plan_on_nodes_is_completed(tmp_path: Path) -> None:
    asked = AskedJob(job_in(tmp_path, "h100-sxm").job, ("plan.tp=2",))
    assert asked.needs_plan
    assert (asked.to_predict()[0].plan.tp, asked.to_predict()[0].plan.world) == (2, 16)


def test_devices_that_are_said_hold(tmp_path: Path) -> None:
    asked = AskedJob(job_in(tmp_path, "h100-sxm").job, (), AskedCluster(devices=4))
    assert asked.to_plan().job.cluster.num_devices == 4
