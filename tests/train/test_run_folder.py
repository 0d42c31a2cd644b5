"""The folder of a run: one run at a time has it, and a dead one has it no more."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError, RunError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.user_file import FileFault
from shardwright.train.data.cache_lock import alone
from shardwright.train.data.token_cache import remove_unfinished
from shardwright.train.launch.run_folder import (
    LOCK,
    folder_of,
    holding,
    holding_checkpoints,
    make_folder,
    removing_new_folders_on_error,
    unshared_faults,
)
from shardwright.train.launch.scratch_folder import remove_scratch_of, scratch_folder
from shardwright.train.metrics import _keep_until
from shardwright.train.run_files import open_to_append
from support.cases import small_job


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
    assert make_folder(tmp_path / "new") == []


def test_what_killed_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tokens-ab.train.bin.0f.tmp").write_text("half")
    (tmp_path / "tokens-ab.train.bin").write_text("whole")
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens-ab.train.bin"]


HOLDS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from shardwright.train.launch.scratch_folder import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_scratch_folders_go_with_the_lock_of_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its number, which may be of another host: that of a folder in use is that of no process here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        used = Path(other.stdout.readline().strip())
        number = 4_000_000  # beyond what Linux gives
        used = used.rename(tmp_path / f"shardwright-scratch-{number}-x")
        (tmp_path / "shardwright-scratch-4000001-x").mkdir()  # of a process that is about to lock it
        with scratch_folder() as own:
            remove_scratch_of(number)
            assert used.exists() and own.parent == tmp_path
            with scratch_folder():
                assert own.exists()
        assert not own.exists()
        other.kill()
        other.wait()
    with scratch_folder():
        assert not used.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shardwright-scratch-4000001-x"]


def test_a_scratch_folder_that_is_left_is_removed_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number in (7, 77):
        (tmp_path / f"shardwright-scratch-{number}-x").mkdir()
        (tmp_path / f"shardwright-scratch-{number}-x" / ".in-use").touch()
    (tmp_path / "shardwright-scratch-7-y").symlink_to(tmp_path)
    remove_scratch_of(7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shardwright-scratch-7-y", "shardwright-scratch-77-x"]


LINKED = ("metrics.jsonl", "metrics.new", "tensorboard", "profile", "experts.svg", "data", "checkpoints")


@pytest.mark.parametrize("name", LINKED)
def test_what_is_no_file_or_folder_of_a_run_is_refused(name: str, tmp_path: Path) -> None:
    """A FIFO that nobody reads, and a folder in a file's place or the other way round: else a rank ends at it."""
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / name)
    (fault,) = make_folder(run)
    assert re.search(rf"{name} is a FIFO, and a run has a (file|folder) there; remove it, or name another", fault)
    (run / name).unlink()
    is_file = "has a file there" in fault
    (run / name).mkdir() if is_file else (run / name).touch()
    (fault,) = make_folder(run)
    answer = "a folder, and a run has a file" if is_file else "a file, and a run has a folder"
    assert f"{name} is {answer} there; remove it" in fault
    (run / name).rmdir() if is_file else (run / name).unlink()
    (run / name).touch() if is_file else (run / name).mkdir()
    assert make_folder(run) == []


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_runs_folder_is_refused(name: str, tmp_path: Path) -> None:
    """A run would write through the link to somebody else's file; each link is named, with a way out."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    (run / name).symlink_to(victim)
    (fault,) = make_folder(run)
    assert fault.startswith(f"{run / name} is a link, and a run would write through it; remove it, or name ")
    with pytest.raises(PlanError), holding(run, make_folder(run)):
        pass
    assert victim.read_text() == "mine"
    (run / name).unlink()
    assert make_folder(run) == []


def test_a_lock_is_never_written_through(tmp_path: Path) -> None:
    """A link of either kind, and a FIFO, at which an open would wait."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    for make in (lambda lock: lock.symlink_to(victim), lambda lock: os.link(victim, lock), os.mkfifo):
        make(run / LOCK)
        with pytest.raises(PlanError, match=r"\.lock is (a link|no file of its own)"), holding(run, []):
            pass
        (run / LOCK).unlink()
    assert victim.read_text() == "mine"
    with alone(run / ".key.lock", lambda: False, print):
        pass
    (run / ".key.lock").symlink_to(victim)
    with alone(run / ".key.lock", lambda: False, print) as tell:  # as where a file system knows no locks
        assert tell is not None
    assert victim.read_text() == "mine"


def test_metrics_are_written_to_new_files(tmp_path: Path) -> None:
    """Of a file with a second name elsewhere the contents stay; lines that are none are left out."""
    victim, metrics = tmp_path / "victim", tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"step": 9}', '{"checkpoint": 1}', '{"step": "x"}', "[1]", "[" * 99_999, '{"step": 2']
    victim.write_text("\n".join(lines))
    os.link(victim, metrics)
    os.link(victim, tmp_path / "metrics.new")
    _keep_until(metrics, 3)
    assert metrics.read_text() == '{"step": 1}\n{"checkpoint": 1}\n'
    with open_to_append(metrics) as file:
        file.write("more\n")
    _keep_until(metrics, 0)
    assert metrics.read_text() == ""
    assert victim.read_text() == "\n".join(lines)
    metrics.unlink()
    metrics.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(metrics)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileFault, match="is a FIFO"):
        _keep_until(tmp_path / "fifo", 3)


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
    for own, reference in (("kept", tmp_path / "kept"), ("", tmp_path / "a/checkpoints")):
        first, second = writing_to(tmp_path / own if own else ""), writing_to(reference)
        with holding_checkpoints(first, tmp_path / "a"):
            with pytest.raises(PlanError) as refusal, holding_checkpoints(second, tmp_path / "b"):
                pytest.fail("two runs write to one folder")
            (fault,) = refusal.value.faults
            assert fault.startswith(f"checkpoint.path {reference} is in use by another run, process {os.getpid()} on ")
            assert fault.endswith("; wait for its end, or name another folder in checkpoint.path")
        with holding_checkpoints(second, tmp_path / "b"):
            pass
        assert list(reference.iterdir()) == []


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


def refused(folder: Path, refusal: BaseException, *made: str) -> None:
    """A run is refused, which has made its folder, others in it, and files, which are those with a dot."""
    with removing_new_folders_on_error(folder), holding(folder, make_folder(folder)):
        for name in made:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch() if "." in name else (folder / name).mkdir()
        raise refusal


@pytest.mark.parametrize("refusal", [PlanError("data", ["there is none"]), SystemExit(2)], ids=["here", "a rank's"])
def test_a_refused_run_leaves_no_empty_folder(tmp_path: Path, refusal: BaseException) -> None:
    """Nor those above it that it made; what was there stays, and so does what has a file."""
    runs, folder = tmp_path / "runs", tmp_path / "runs" / "name"
    with pytest.raises(type(refusal)):
        refused(folder, refusal, "data")
    assert not list(tmp_path.iterdir())
    runs.mkdir()
    with pytest.raises(type(refusal)):
        refused(folder, refusal)
    assert list(tmp_path.rglob("*")) == [runs]
    folder.mkdir()
    with pytest.raises(type(refusal)):
        refused(folder, refusal)
    assert folder.is_dir()
    folder.rmdir()
    with pytest.raises(type(refusal)):
        refused(folder, refusal, "data/tokens.bin", "empty")
    assert (folder / "data" / "tokens.bin").exists() and not (folder / "empty").exists()


def test_a_run_that_fails_later_keeps_its_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        refused(tmp_path / "run", RunError("the loss is nan"))
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    "given",
    [
        ["--set", "data.path=nowhere"],
        ["--from", "nowhere"],
        ["--set", "model.weights=nowhere"],
        ["--set", "cluster.device=h100"],
        ["--set", "data.path=nowhere", "--set", "checkpoint.every_steps=5", "--set", "checkpoint.path=kept"],
    ],
)
def test_a_refused_command_leaves_nothing(tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(cli, ["train", "quickstart", "--set", "optimizer.steps=1", *given])
    assert run.exception is not None
    assert not list(tmp_path.iterdir())
