"""A device with another memory than its entry's: one name says it, and every command follows."""

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardwright as sw
from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.catalog_entry import entry_faults, read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.device_name import device_name
from shardwright.config.units import GIB

KEPT = [
    "plan.tp=4",
    "plan.pp=1",
    "plan.cp=1",
    "plan.microbatch_size=1",
    "plan.recompute=none",
    "plan.offload_optimizer=0",
]


def test_a_name_says_the_memory_and_all_else_stays() -> None:
    usual, other = (read_entry("devices", name, DeviceSpec) for name in ("h100-sxm", "h100-sxm@94gib"))
    assert other == usual.model_copy(update={"name": "h100-sxm@94gib", "memory_gib": 94.0})
    assert other.offered_bytes - usual.offered_bytes == 14 * GIB
    assert device_name("H100 SXM5@120.5gib") == "h100-sxm@120.5gib"
    assert "h100-sxm@94gib" not in catalog.names("devices")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("h1000@94gib", "not in the catalog"),
        ("h100-sxm@94", "not in the catalog"),
        ("h100-sxm@94gib@80gib", "not in the catalog"),
        ("h100-sxm@0gib", "memory_gib"),
        ("h100-sxm@0.3gib", "leave nothing for a plan"),
    ],
)
def test_a_wrong_memory_is_a_fault(name: str, fault: str) -> None:
    assert fault in " ".join(entry_faults("cluster.device", "devices", name, DeviceSpec))


def test_the_option_keeps_the_cluster_and_replaces_the_memory() -> None:
    fields = {"device": "h100-sxm", "devices_per_node": 8, "nodes": 4, "name": "mine", "usd_per_device_hour": 2.0}
    assert AskedCluster(memory_gib=94).over(fields) == fields | {"device": "h100-sxm@94gib"}
    assert AskedCluster(memory_gib=96.5).over(fields | {"device": "h100-sxm@94gib"})["device"] == "h100-sxm@96.5gib"
    assert AskedCluster(16, "H100", memory_gib=64).over({})["device"] == "h100-sxm@64gib"
    for device, way_out in (("unknown", "name one with --device"), ("mine.toml", "set memory_gib in mine.toml")):
        with pytest.raises(ValueError, match=way_out):
            AskedCluster(memory_gib=64).over(fields | {"device": device})


@pytest.mark.parametrize("gib", [1e-9, -5.0, 1e12, math.nan])
def test_a_memory_that_no_name_says_is_refused_as_it_was_asked_for(gib: float) -> None:
    with pytest.raises(ValueError, match=rf"memory_gib is {re.escape(f'{gib:g}')}; use a number of GiB, 0\.001 to"):
        AskedCluster(device="h100-sxm", memory_gib=gib).over({})
    assert AskedCluster(device="h100-sxm", memory_gib=2.0**30).over({})["device"] == "h100-sxm@1073741824gib"
    done = CliRunner().invoke(cli, ["estimate", "tiny-llama", "--device", "h100-sxm", "--memory-gib", str(gib)])
    assert isinstance(done.exception, SystemExit | ValueError), done.exception
    assert " 0.0 GiB" not in f"{done.output}{done.exception}"


def test_plans_fill_the_memory_that_there_is(tmp_path: Path) -> None:
    job, more, less = (sw.load("llama3-8b", devices=8, device="h100-sxm", memory_gib=gib) for gib in (0, 160, 36))
    usual, roomy, short = (one.plan(keep=KEPT, top=1) for one in (job, more, less))
    same_plan = {"plan": usual.dicts()[0]["plan"]}
    assert more.with_(**same_plan).estimate().step_s == job.with_(**same_plan).estimate().step_s
    assert short.dicts()[0]["step_s"] > usual.dicts()[0]["step_s"] >= roomy.dicts()[0]["step_s"]
    for plans, gib in ((roomy, 160), (short, 36)):
        assert plans.recommended.spec.cluster.device == f"h100-sxm@{gib}gib"
        assert plans.recommended.estimate().fits and plans.dicts()[0]["memory"]["process"] <= gib * GIB
    roomy.recommended.save(tmp_path / "job.toml")
    assert sw.load(tmp_path / "job.toml").spec == roomy.recommended.spec
    columns = job.compare(["h100-sxm:8", "h100-sxm@160gib:8"], keep=KEPT).to_dict()["clusters"]
    assert columns[1]["room_bytes"] - columns[0]["room_bytes"] == 80 * GIB


def test_commands_take_the_option() -> None:
    words = [
        "estimate",
        "tiny-llama",
        "--set",
        "plan.dp=8",
        "--devices",
        "8",
        "--device",
        "h100-sxm",
        "--memory-gib",
        "94",
        "--json",
    ]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert json.loads(done.stdout)["device_memory_bytes"] == 94 * GIB
