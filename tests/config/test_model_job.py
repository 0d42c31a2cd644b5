"""A cluster that options ask for, and what a model of the catalog has where nobody states it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.asked_cluster import NOTHING_ASKED, AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.load import job_to_plan, load_job, read_job
from shardwright.config.model import ModelSpec
from shardwright.config.model_job import usual_batch

SELENE = {"name": "selene", "device": "a100-sxm-80g", "devices_per_node": 8, "nodes": 560, "software": "llama3",
          "intra_node": {"bandwidth_gb_per_s": 300.0}}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (AskedCluster(64, "h100-sxm"), (8, 8)),
        (AskedCluster(4, "H100"), (4, 1)),
        (AskedCluster(144, "gb200-nvl72"), (72, 2)),
        (AskedCluster(12, "rtx-4090", 4), (4, 3)),
    ],
)
def test_devices_stand_in_their_usual_nodes(asked: AskedCluster, made: tuple[int, int]) -> None:
    cluster = asked.over({})
    assert (cluster["devices_per_node"], cluster["nodes"]) == made
    assert cluster["device"] in catalog.names("devices") and cluster["name"].endswith(f"-{asked.devices}")


def test_another_device_forgets_the_old_links_and_another_size_keeps_them() -> None:
    other = AskedCluster(0, "h100-sxm").over(SELENE)
    assert other["nodes"] == 560 and other["software"] == "llama3" and "intra_node" not in other
    fewer = AskedCluster(64).over(SELENE)
    assert fewer == SELENE | {"nodes": 8}
    assert AskedCluster(64, devices_per_node=4).over(SELENE)["nodes"] == 16
    assert NOTHING_ASKED.over(SELENE) == SELENE


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("cluster.nodes=7", r"7 x cluster.devices_per_node 8 are 56 devices, and --devices is 64"),
        ("cluster.devices_per_node=4", r"8 x cluster.devices_per_node 4 are 32 .* say --devices-per-node 4"),
    ],
)
def test_nodes_that_have_other_devices_than_are_asked_for_are_refused(override: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        read_job("llama3-8b", [override], AskedCluster(64, "h100-sxm"))
    both = ("cluster.nodes=16", "cluster.devices_per_node=4")
    section = read_job("llama3-8b", both, AskedCluster(64, "h100-sxm")).fields["cluster"]
    assert (section["nodes"], section["devices_per_node"]) == (16, 4)
    assert read_job("llama3-8b", [override], AskedCluster(0, "h100-sxm"))


def test_one_device_is_a_node_whatever_is_usual() -> None:
    assert AskedCluster(1, "rtx-4090").over({})["devices_per_node"] == 1


@pytest.mark.parametrize(
    ("asked", "given", "fault"),
    [
        (AskedCluster(12, "h100-sxm"), {}, r"12 / 8 = 1.50\); use 8 or 16"),
        (AskedCluster(12, "rtx-4090"), {}, "add --devices-per-node"),
        (AskedCluster(8), {}, "the cluster's nodes; add --device, such as h100-sxm, or --devices-per-node, such as 8"),
        (AskedCluster(8, "h1000"), {}, "not in the catalog of devices; did you mean"),
        (AskedCluster(8), {"parts": [{"device": "a40"}]}, "leave them out"),
    ],
)
def test_what_can_not_be_made_is_said(asked: AskedCluster, given: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        asked.over(dict(given))


@given(st.sampled_from(catalog.names("models")), st.integers(1, 20_000))
def test_a_usual_batch_is_of_whole_sequences_for_each_device(name: str, num_devices: int) -> None:
    """Of about half a million to four million tokens, but for rounding to the devices, whose odd part divides it."""
    model = ModelSpec.model_validate(catalog.read("models", name))
    batch = usual_batch(model, num_devices)
    odd = num_devices // (num_devices & -num_devices)
    assert batch % odd == 0
    assert batch % num_devices == 0 or batch < num_devices + odd
    unit = num_devices if batch >= num_devices else odd
    assert batch == unit or 2**19 / 1.5 <= batch * model.sequence <= 2**22 * 1.5
    each = batch // unit
    assert each // (each & -each) in (1, 3)


def test_microbatches_can_be_made_of_a_usual_batch() -> None:
    """Of 4,098 sequences on 6 devices each had 683, which is prime: the best plan took half as long again a token."""
    switch, llama = (
        ModelSpec.model_validate(catalog.read("models", name)) for name in ("switch-base-128", "llama3-8b")
    )
    assert [usual_batch(switch, num) for num in (6, 8, 24, 100)] == [4608, 4096, 4608, 4800]
    assert [usual_batch(llama, num) for num in (8, 24, 64, 96, 12288)] == [256, 288, 256, 288, 288]


def test_a_model_takes_the_numbers_that_its_device_has() -> None:
    on = {device: read_job("gpt2", [], AskedCluster(8, device)) for device in ("h100-sxm", "v100-sxm-32g")}
    assert [read.fields["precision"]["compute"] for read in on.values()] == ["bf16", "fp16"]
    assert all(read.fields["optimizer"]["steps"] == 1_907_349 for read in on.values())
    assert all(read.is_model and "512 sequences, 524,288 tokens" in read.filled_in for read in on.values())
    stated = read_job(
        "gpt2",
        ["precision.compute=float32", "batch.global_batch_size=16", "optimizer.steps=30"],
        AskedCluster(8, "h100-sxm"),
    )
    assert stated.filled_in == ""
    assert job_to_plan(stated.fields, "gpt2").batch.global_batch_size == 16


def test_dp_takes_the_ranks_that_a_plan_leaves() -> None:
    read = read_job("llama3-8b", ["plan.tp=4", "plan.pp=2"], AskedCluster(64, "h100-sxm"))
    assert read.fields["plan"] == {"tp": 4, "pp": 2, "dp": 8}


def test_a_job_of_the_same_name_is_meant_before_a_model() -> None:
    assert not read_job("yi-34b", [], AskedCluster(64, "h100-sxm")).is_model
    assert read_job("yi-6b", [], AskedCluster(64, "h100-sxm")).is_model


def test_a_model_without_a_cluster_is_no_job() -> None:
    with pytest.raises(PlanError, match=r"'llama3-8b' is a model.*--devices 64 --device h100-sxm"):
        load_job("llama3-8b")


def test_adapters_have_a_run_of_their_own_and_a_user_may_state_another() -> None:
    asked, adapted = AskedCluster(1, "rtx-4090"), ["model.adapter.rank=16", "model.adapter.base=nf4"]
    usual = read_job("llama3-8b", adapted, asked)
    assert "a run has 1e8 tokens" in usual.filled_in and "usual for adapters" in usual.filled_in
    assert usual.fields["batch"]["global_batch_size"] == 16
    tokens = usual.fields["batch"]["global_batch_size"] * 8192
    assert usual.fields["optimizer"]["steps"] == max(1, round(1e8 / tokens))
    stated = read_job("llama3-8b", [], AskedCluster(64, "h100-sxm"), 3e11)
    assert "a run has" not in stated.filled_in
    sizes = stated.fields["batch"]["global_batch_size"], stated.fields["optimizer"]["steps"]
    assert sizes[0] * sizes[1] * 8192 == pytest.approx(3e11, rel=1e-4)
