"""Ranks that fail are started anew and go on from what they have saved; or the run ends with the cause."""

import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.base import PlanError, RunError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.launch.launch import RankFailedError, launch
from shardwright.train.launch.preemption import Preemption
from shardwright.train.launch.restarts import LONGEST_DELAY_S, Restarts, launch_with_restarts
from support.cases import small_job

STEPS = 4


@given(
    gaps_s=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=30),
    most=st.integers(0, 5),
    window_s=st.floats(1.0, 100.0),
)
def test_no_window_has_more_restarts_than_allowed(gaps_s: list[float], most: int, window_s: float) -> None:
    restarts, now_s, granted = Restarts(most, window_s), 0.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        recent = [time_s for time_s in granted if now_s - time_s < window_s]
        delay_s = restarts.delay_s(now_s)
        assert (delay_s is None) == (len(recent) >= most)
        if delay_s is not None:
            granted.append(now_s)
            assert 0 < delay_s <= LONGEST_DELAY_S
    assert restarts.total == len(granted)


def test_delays_grow_within_a_window_and_begin_anew_after_it() -> None:
    restarts = Restarts(10, 100.0)
    delays_s = [restarts.delay_s(float(now_s)) for now_s in range(9)]
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert restarts.delay_s(200.0) == 0.5
    assert (restarts.total, restarts.of_window()) == (10, 1)


def job_of(timeout_s: float = 60.0, every_steps: int = 1, most: int = 3, window_s: float = 3600.0) -> JobSpec:
    """Two ranks that say that they save after each step."""
    job = small_job(dp=2)
    run = job.run.model_copy(
        update={"device": "cpu", "timeout_s": timeout_s, "max_restarts": most, "restart_window_s": window_s}
    )
    checkpoint = job.checkpoint.model_copy(update={"every_steps": every_steps})
    return job.model_copy(update={"run": run, "checkpoint": checkpoint})


def fail(how: str, mesh: Mesh) -> None:
    """Let a rank fail in one of several ways."""
    if how == "server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif how == "hangs":
        time.sleep(60)
    elif how == "memory":
        raise MemoryError
    elif how == "error":
        raise KeyError("a defect")
    elif how == "input":
        raise PlanError("the text", ["it has none"])
    elif how == "diverges":
        raise RunError("the loss is nan")
    else:
        os.kill(os.getpid(), signal.Signals[how])


def steps(job: JobSpec, mesh: Mesh, folder: Path, how: str, times: int) -> tuple[int, int]:
    """Do steps, each saved by rank 0; rank 1 fails in the second step of each of the first attempts. Returns where
    this attempt began, and its number."""
    saved = folder / "saved"
    first = int(saved.read_text()) if saved.exists() else 0
    attempts = folder / f"attempts {mesh.rank}"
    attempt = (int(attempts.read_text()) if attempts.exists() else 0) + 1
    attempts.write_text(str(attempt))
    for step in range(first, STEPS):
        if mesh.rank == 1 and step == first + 1 and attempt <= times:
            fail(how, mesh)
        barrier(mesh.world)
        if mesh.rank == 0:
            saved.write_text(str(step + 1))
        barrier(mesh.world)
    return first, attempt


def run(job: JobSpec, folder: Path, how: str, times: int) -> tuple[list[Any], list[str]]:
    """Results of ranks, and what was said of failures."""
    printed = list[str]()
    work = partial(steps, how=how, times=times)
    preemption = Preemption()
    try:
        results = launch_with_restarts(
            work, job, folder, preemption, lambda error, restart: printed.append(f"{error}\n{restart}"), num_threads=1
        )
    finally:
        preemption.close()
    return results, printed


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("SIGKILL", "rank 1 (pp 0, dp 1, tp 0) was killed by SIGKILL; the other rank was ended"),
        ("SIGSTOP", "rank 1 (pp 0, dp 1, tp 0) has been silent"),
        ("hangs", "rank 1 (pp 0, dp 1, tp 0) is alive and busy"),
        ("server", "the server that ranks are forked from was killed by SIGKILL; the other 2 ranks were ended"),
        ("memory", "rank 1 (pp 0, dp 1, tp 0) failed: ran out of memory"),
        ("error", "KeyError: 'a defect'"),
    ],
)
def test_a_failure_is_followed_by_a_restart(tmp_path: Path, how: str, cause: str) -> None:
    results, (printed,) = run(job_of(timeout_s=3.0), tmp_path, how, times=1)
    assert results == [(1, 2)] * 2
    assert cause in printed
    assert printed.splitlines()[-1] == "restart 1 of 3 within 3600 s, in 0.5 s"


def test_at_the_limit_the_run_ends_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as end:
        run(job_of(most=1), tmp_path, "SIGKILL", times=2)
    cause, limit = str(end.value).splitlines()
    assert "was killed by SIGKILL" in cause
    assert limit == (
        "ranks were started anew 1 time within 3600 s, which is what run.max_restarts and run.restart_window_s allow"
    )
    assert (tmp_path / "attempts 1").read_text() == "2"


def test_restarts_before_the_window_do_not_count(tmp_path: Path) -> None:
    results, printed = run(job_of(most=1, window_s=1e-3), tmp_path, "SIGKILL", times=2)
    assert results == [(2, 3)] * 2
    assert len(printed) == 2


@pytest.mark.parametrize(("how", "refusal"), [("input", PlanError), ("diverges", RankFailedError)])
def test_what_would_come_again_is_not_tried_again(tmp_path: Path, how: str, refusal: type[Exception]) -> None:
    with pytest.raises(refusal):
        run(job_of(), tmp_path, how, times=math.inf)  # type: ignore[arg-type]
    assert (tmp_path / "attempts 1").read_text() == "1"


def test_without_restarts_there_is_one_attempt(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"was killed by SIGKILL.*when memory runs out$"):
        run(job_of(most=0), tmp_path, "SIGKILL", times=2)
    with pytest.raises(RankFailedError, match="was killed by SIGKILL"):
        launch(partial(steps, how="SIGKILL", times=9), job_of(), tmp_path, num_threads=1)
    assert (tmp_path / "attempts 1").read_text() == "2"
