"""The folder of a run: one run at a time has it, and a dead one has it no more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cases import small_job
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.train.data.token_cache import remove_unfinished
from shardwright.train.launch.run_folder import (
    LOCK,
    folder_faults,
    folder_of,
    holding,
    holding_checkpoints,
    unshared_faults,
)
from shardwright.train.launch.scratch_folder import remove_scratch_of, scratch_folder


def test_a_second_run_is_refused_with_who_has_the_folder(tmp_path: Path) -> None:
    with holding(tmp_path, []):
        with pytest.raises(PlanError) as refusal, holding(tmp_path, ["another fault"]):
            pytest.fail("two runs have one folder")
        first, second = refusal.value.faults
        assert first == "another fault"
        assert second.startswith(f"run.folder {tmp_path} is in use by another run, process {os.getpid()} on ")
        assert second.endswith("; wait for its end, or name another folder in run.folder")
    assert not list(tmp_path.iterdir())
    with holding(tmp_path, []):
        pass


def test_a_dead_run_has_no_folder(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\nfrom shardwright.train.launch.run_folder import holding\n"
        f"with holding(pathlib.Path({str(tmp_path)!r}), []):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(PlanError, match=f"process {other.pid} on "), holding(tmp_path, []):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    with holding(tmp_path, []):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK).read_text()


def test_which_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = small_job()
    for asked, folder in (("~/a", tmp_path / "a"), ("b", Path("b")), ("", Path("runs", job.name))):
        assert folder_of(job.model_copy(update={"run": job.run.model_copy(update={"folder": asked})})) == folder
    assert folder_faults(tmp_path / "new") == []


def test_what_killed_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tokens-ab.train.bin.0f.tmp").write_text("half")
    (tmp_path / "tokens-ab.train.bin").write_text("whole")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens-ab.train.bin"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"shardwright-scratch-{gone.pid}-x"
    left.mkdir()
    with scratch_folder() as mine:
        assert not left.exists() and mine.parent == tmp_path
        with scratch_folder():
            assert mine.exists()
    assert not mine.exists()
    left.mkdir()
    remove_scratch_of(gone.pid)
    assert not left.exists()


def test_a_folder_that_machines_do_not_share(tmp_path: Path) -> None:
    with holding(tmp_path, []):
        assert unshared_faults(tmp_path, 5.0) == []
    (fault,) = unshared_faults(tmp_path, 0.0)
    assert fault == (
        f"run.folder {tmp_path} is not the one that rank 0 writes to, and a run goes on from checkpoints of all "
        "machines; name a folder in run.folder or checkpoint.path that all of them share"
    )


def writing_to(place: Path | str) -> JobSpec:
    return make_job(small_job().model_dump(exclude_unset=True) | {"checkpoint": {"every_steps": 1, "path": str(place)}})


def test_two_runs_do_not_write_into_one_anothers_checkpoints(tmp_path: Path) -> None:
    """Neither where both name a folder, nor where one names that of the other's run."""
    for mine, theirs in (("kept", tmp_path / "kept"), ("", tmp_path / "a/checkpoints")):
        first, second = writing_to(tmp_path / mine if mine else ""), writing_to(theirs)
        with holding_checkpoints(first, tmp_path / "a"):
            with pytest.raises(PlanError) as refusal, holding_checkpoints(second, tmp_path / "b"):
                pytest.fail("two runs write to one folder")
            (fault,) = refusal.value.faults
            assert fault.startswith(f"checkpoint.path {theirs} is in use by another run, process {os.getpid()} on ")
            assert fault.endswith("; wait for its end, or name another folder in checkpoint.path")
        with holding_checkpoints(second, tmp_path / "b"):
            pass
        assert list(theirs.iterdir()) == []


def test_checkpoints_in_the_run_folder_itself_are_held_with_it(tmp_path: Path) -> None:
    with holding(tmp_path, []), holding_checkpoints(writing_to(tmp_path), tmp_path):
        pass


@pytest.mark.parametrize("place", ["memory://x", ""])
def test_what_is_no_folder_or_not_written_to_is_not_held(place: str, tmp_path: Path) -> None:
    job = writing_to(place) if place else small_job()
    with holding_checkpoints(job, tmp_path), holding_checkpoints(job, tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_place_for_checkpoints_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(PlanError, match=r"checkpoint.path .*file is a file; name another folder in checkpoint.path"),
        holding_checkpoints(writing_to(tmp_path / "file/x"), tmp_path),
    ):
        pass
