"""The folder of a run: one run at a time has it, and a dead one has it no more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cases import small_job
from shardwright.config.base import PlanError
from shardwright.train.data.token_cache import remove_unfinished
from shardwright.train.launch.run_folder import LOCK, folder_faults, folder_of, holding, unshared_faults
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
