"""A job for devices that are not here is refused before ranks start; what can run here is not."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli.checked_job import load
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.train.launch import this_machine
from shardwright.train.launch.this_machine import cluster_faults


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> "list[int]":
    """How many CUDA devices this machine seems to have; none at first. It seems to host 32 ranks on its CPU."""
    count = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count[0] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count[0])
    monkeypatch.setattr(this_machine, "_most_on_cpu", lambda: (32, ""))
    return count


def faults(job: str, *overrides: str) -> list[str]:
    return cluster_faults(load(job, overrides))


def test_many_ranks_on_devices_that_are_not_here(cuda: list[int]) -> None:
    (fault,) = faults("yi-34b")
    assert fault.startswith("the job is for 512 ranks on a800-sxm-80g, and this machine has no CUDA device, and hosts")
    assert "at most 32 on its CPU; `shardwright dryrun` runs any one" in fault and "fewer ranks" in fault
    cuda[0] = 8
    assert "this machine has 8 CUDA devices" in faults("yi-34b")[0]
    cuda[0] = 512
    assert faults("yi-34b") == []


def test_few_ranks_may_run_on_the_cpu_if_the_user_says_so(cuda: list[int]) -> None:
    (fault,) = faults("quickstart", "cluster.device=h100-sxm")
    assert "and --set run.device=cpu --set cluster.device=unknown all of them on this CPU" in fault
    for answer in (
        ("run.device=cpu", "cluster.device=unknown"),
        ("run.device=cpu", "cluster.device=h100-sxm"),
        ("cluster.device=laptop-cpu",),
        (),
    ):
        assert faults("quickstart", *answer) == []
    cuda[0] = 8
    assert faults("quickstart", "cluster.device=h100-sxm") == []


def test_parts_are_of_devices_too(cuda: list[int]) -> None:
    (fault,) = faults(str(Path(__file__).parents[2] / "docs" / "mixed.toml"))
    assert "ranks on a100-sxm-80g and v100-sxm-32g" in fault


def test_train_says_so_before_it_reads_any_text(cuda: list[int]) -> None:
    refused = CliRunner().invoke(cli, ["train", "yi-34b", "--set", "data.path=/not/there"])
    assert isinstance(refused.exception, PlanError) and len(refused.exception.faults) == 1
    assert "512 ranks on a800-sxm-80g" in refused.exception.faults[0]
