"""Plans fit in the memory that a device shows less a stated margin, whichever the software."""

import pytest

from shardwright.config import catalog
from shardwright.config.cluster import DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.units import GIB
from shardwright.cost.calibration import device_of, shipped
from shardwright.memory.job_memories import fullest, room_words
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_price import room_bytes
from shardwright.planner.search.search import search
from support.planned import small_job

# GiB that public logs of torch have as the least total capacity of a card.
SHOWN = {"h100-sxm": 79.1, "a100-sxm-80g": 79.14, "a800-sxm-80g": 79.14, "a100-sxm-40g": 39.38, "h200-sxm": 139.72}


def on(device: str, software: str) -> JobSpec:
    """A small job that fills its devices."""
    job = small_job("dense", 2)
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": device, "software": software})})


@pytest.mark.parametrize("name", SHOWN)
def test_a_card_offers_no_more_than_it_shows(name: str) -> None:
    device = device_of(name)
    assert device.offered_bytes <= (SHOWN[name] + 0.005) * GIB
    assert device.room_bytes < device.offered_bytes < device.memory_bytes


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_device_keeps_some_of_its_memory(name: str) -> None:
    """And this runtime keeps more of it free, for a process's own."""
    device = device_of(name)
    assert 0.85 * device.memory_bytes < device.offered_bytes < device.memory_bytes
    assert 0 < device.room_bytes < device.offered_bytes


def test_an_entry_that_does_not_say_is_taken_to_keep_a_share() -> None:
    """So a file of one's own with more memory always offers more."""
    offered = [DeviceSpec(name="mine", memory_gib=gib).offered_bytes for gib in (79.0, 80.0, 82.0)]
    assert offered == sorted(offered) and offered[1] < 79.2 * GIB


@pytest.mark.parametrize("software", ["shardwright", "megatron-core"])
def test_plans_that_are_found_fit_in_what_the_card_shows(software: str) -> None:
    """With what their processes take besides, which is told."""
    job = on("a100-sxm-40g", software)
    plans = search(job, Constraints({"schedule": "1f1b"}), shipped(), 3).candidates
    assert plans and room_bytes(job) < 39.39 * GIB
    for plan in plans:
        memory = fullest(plan.job, shipped())
        assert memory.process <= room_bytes(job) and memory.overhead > GIB
    assert "GiB" in room_words(job, shipped()) and "context" in room_words(job, shipped())
