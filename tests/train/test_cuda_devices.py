"""The CUDA devices that launchers and ranks choose, on a machine that only says it has some."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config.load import load_job
from shardwright.sharding.block_sizes import loss_chunk_bytes
from shardwright.train.launch import rank_life
from shardwright.train.launch.rank_environment import RankEnvironment, set_device_environment
from shardwright.train.launch.this_machine import choose_device, machine_faults, on_this_machine
from support.cases import small_job


class Machine:
    """Stands for torch.cuda of a machine with so many devices, and notes which of them get a context."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices, self.contexts = num_devices, list[int]()

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def set_device(self, device: Any) -> None:
        self.contexts.append(torch.device(device).index)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    result = Machine(8)
    for name in ("is_available", "device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(result, name))
    return result


def test_a_launcher_makes_no_context(machine: Machine) -> None:
    """One takes half a gigabyte of the first device, and devices in exclusive mode have room for none."""
    job = small_job(dp=8, batch=8).model_copy(
        update={"run": SimpleNamespace(device="cuda", port=0, folder="runs", wandb="off", prometheus="")}
    )
    assert machine_faults(job) == []
    machine.num_devices = 4
    assert "has 4 CUDA devices" in machine_faults(job)[0]
    assert machine.contexts == []


def test_a_job_without_a_device_runs_where_its_ranks_have_room(machine: Machine) -> None:
    answer = list[str]()
    job = load_job("quickstart", [])
    assert on_this_machine(job, 8, answer.append).run.device == "cuda" and not answer
    machine.num_devices = 1
    assert on_this_machine(job, 8, answer.append).run.device == "cpu"
    assert "8 ranks on this machine's CPU, for it has 1 CUDA device;" in answer[0]
    for stays in ("cluster.device=h100-sxm", "run.device=cuda", "run.device=cpu"):
        named = load_job("quickstart", [stays])
        assert on_this_machine(named, 8, answer.append) == named
    machine.num_devices = 0
    assert on_this_machine(job, 8, answer.append) == job and len(answer) == 1


def test_chunks_of_the_loss_are_those_of_the_device_that_was_taken(machine: Machine) -> None:
    """Else a chunk on CUDA would have the 32 MiB of a processor's cache: 64 tokens of a vocabulary of 128,256."""
    job = load_job("quickstart", ["model.name=llama3-8b", "model.layers=4"])
    taken = on_this_machine(job, job.plan.world, print)
    assert loss_chunk_bytes(taken) > 2**30 > loss_chunk_bytes(job)


def test_a_rank_takes_the_device_of_its_number(machine: Machine) -> None:
    assert [choose_device("auto", rank).index for rank in (0, 5)] == [0, 5] == machine.contexts
    assert choose_device("cpu", 5).type == "cpu" and machine.contexts == [0, 5]


def test_a_rank_that_sees_one_device_takes_that(machine: Machine) -> None:
    """As under `srun --gpus-per-task=1`: its number among the node's ranks is no number of a device."""
    machine.num_devices = 1
    assert choose_device("cuda", 5) == torch.device("cuda", 0) and machine.contexts == [0]


def environment_of(local_world: int, **said: str) -> dict[str, str]:
    variables = dict(said)
    set_device_environment(local_world, variables)
    return variables


def test_what_nobody_has_said_of_cuda_is_set() -> None:
    alone = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "WARN"}
    assert environment_of(1) == alone
    assert environment_of(8) == alone | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_said_of_cuda_stays(name: str) -> None:
    printed = {name: "max_split_size_mb:256", "NCCL_DEBUG": "INFO", "TORCHINDUCTOR_COMPILE_THREADS": "16"}
    assert environment_of(8, **printed) == printed


class BeganError(Exception):
    """Stands for the moment at which CUDA begins."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_sets_it_before_cuda_begins(machine: Machine, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    asked: list[int] = []
    monkeypatch.setattr(rank_life, "set_device_environment", asked.append)

    def begin(*_: Any) -> None:
        raise BeganError

    monkeypatch.setattr(rank_life, "choose_device", begin)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    answer: list[rank_life.Failure] = []

    def end(failure: rank_life.Failure, tell: Any) -> None:
        answer.append(failure)

    monkeypatch.setattr(rank_life, "give_up", end)
    job = small_job(dp=8, batch=8)
    job = job.model_copy(update={"run": job.run.model_copy(update={"device": device})})
    rank_life.run_rank(
        RankEnvironment(3, 3, 8, 8), lambda *_: None, job, Path("/nowhere"), answer.append, num_threads=1
    )
    assert "BeganError" in answer[0].message
    assert asked == ([8] if device == "cuda" else [])
