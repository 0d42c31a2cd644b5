"""When a run writes checkpoints, as far as its job can say it."""

from typing import Any

import pytest

from shardwright.config import catalog
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.cluster_facts import device_hours_between_failures
from shardwright.config.load import make_job

PART = {"devices_per_node": 8, "nodes": 1}


def hours_of(device: str) -> float:
    return DeviceSpec.model_validate(catalog.read("devices", device)).hours_between_failures


@pytest.mark.parametrize(
    ("cluster", "whose"),
    [
        ({}, "cluster.device is unknown"),
        ({"device": "rtx-4090"}, "rtx-4090 has none in the catalog"),
        (
            {"parts": [PART | {"device": "h100-sxm"}, PART | {"device": "rtx-4090"}]},
            "h100-sxm or rtx-4090 has none in the catalog",
        ),
    ],
)
def test_auto_is_refused_where_nobody_knows_how_often_devices_fail(cluster: dict[str, Any], whose: str) -> None:
    plan = {"pp": 16} if "parts" in cluster else {}
    model = {"layers": 16, "hidden": 64, "heads": 4, "sequence": 64}
    job = {"cluster": cluster, "plan": plan, "model": model}
    with pytest.raises(ValueError, match="which is not known") as refusal:
        make_job(job | {"checkpoint": {"auto": True}})
    assert f"cluster.hours_between_failures is 0, and {whose}; set cluster.hours_between_failures" in str(refusal.value)
    make_job(job | {"checkpoint": {"every_steps": 5}})
    make_job(job | {"checkpoint": {"auto": True}, "cluster": cluster | {"hours_between_failures": 1000.0}})


def test_auto_takes_what_is_usual_for_the_device() -> None:
    assert hours_of("h100-sxm") > 0
    make_job({"checkpoint": {"auto": True}, "cluster": {"device": "h100-sxm"}})


def test_a_device_that_is_none_is_one_fault() -> None:
    with pytest.raises(ValueError, match="is not in the catalog of devices") as refusal:
        make_job({"checkpoint": {"auto": True}, "cluster": {"device": "h100-smx"}})
    assert "checkpoint.auto" not in str(refusal.value)


def test_devices_of_several_kinds_fail_as_often_as_their_mean() -> None:
    parts = [PART | {"device": "h100-sxm", "nodes": 3}, PART | {"device": "a100-sxm-80g"}]
    result = device_hours_between_failures(ClusterSpec.model_validate({"parts": parts}))
    assert 32 / result == pytest.approx(24 / hours_of("h100-sxm") + 8 / hours_of("a100-sxm-80g"))
    own = ClusterSpec.model_validate({"parts": parts, "hours_between_failures": 7.0})
    assert device_hours_between_failures(own) == 7.0
