"""How many threads a rank of this machine computes with on a CPU."""

import os
from pathlib import Path

import pytest
import torch

from shardwright.api import training
from shardwright.api.reported_run import ReportedRun
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.launch import rank_life
from shardwright.train.launch.launch import launch
from shardwright.train.launch.rank_environment import RankEnvironment, allowed_threads
from support.cases import small_job

CORES = os.cpu_count() or 1


def threads(job: JobSpec, mesh: Mesh, folder: Path) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("variable", "allowed"),
    [("1", 1), (" 1,4 ", 1), ("9" * 30, CORES), ("0", 0), ("", 0), ("-1", 0), ("many", 0), ("²", 0)],
)
def test_what_the_variable_allows(variable: str, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert allowed_threads() == allowed


def test_torchrun_says_1_where_nobody_said_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert allowed_threads() == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert allowed_threads() == min(2, CORES)


def test_a_rank_that_slurm_started_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    reported = ReportedRun(small_job(), print)
    monkeypatch.setattr(rank_life, "run_rank", lambda *args: given.append(args[-1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    training._run_rank_in(tmp_path, small_job(), RankEnvironment(0, 0, 1, 1), training.StartOptions(), reported)
    assert given == [1]


def test_a_rank_has_the_threads_that_its_user_allows_or_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself would take the variable, but what is forked from a server has one thread until it is told."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(threads, small_job(), tmp_path) == [1]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch(threads, small_job(), tmp_path) == [CORES]
