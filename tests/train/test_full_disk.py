"""A full disk is told with the file and the room, wherever a run writes."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardwright.config.base import PlanError
from shardwright.train.data.token_cache import Summary, save_summary
from shardwright.train.launch.full_disk import DiskFullError, telling_of_full_disk
from support.forked_commands import SHARDWRIGHT, run_forked


def test_a_device_that_takes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(DiskFullError) as answer, telling_of_full_disk(path):
        path.write_text("x")
    assert str(answer.value).startswith(f"{path} can't be written: No space left on device (")
    assert str(answer.value).endswith(" MiB are free in /dev); make room there or name another run.folder")


@pytest.mark.processes
def test_a_run_whose_output_goes_to_a_full_disk_ends_with_a_sentence(tmp_path: Path) -> None:
    """The rank that can't print can't print why, either."""
    overrides = ["plan.tp=1", "plan.pp=1", "plan.dp=1", "optimizer.steps=1", f"run.folder={tmp_path / 'run'}"]
    (tmp_path / "text.txt").write_text("a few words " * 1000)
    overrides += [f"data.path={tmp_path / 'text.txt'}", "optimizer.warmup_steps=0"]
    program = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {SHARDWRIGHT}"
    done = run_forked(program, "train", "quickstart", *(f"--set={one}" for one in overrides))
    assert done.returncode == 1
    assert "failed: standard output can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), telling_of_full_disk(tmp_path):
        (tmp_path / "nowhere" / "file").write_text("x")


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may be larger than 4 KiB: nor one that its output goes to, so it must print nothing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_token_files(tmp_path: Path) -> None:
    """They are no wrong input where only the room is missing, and nothing of them is left."""
    summary = Summary("<u2", 1, 1, 0, 0, 0.0)
    starts = {tmp_path / "starts.bin": np.zeros(10_000, np.int64)}
    with pytest.raises(DiskFullError, match=f"{tmp_path} can't be written: File too large"), small_files():
        save_summary(tmp_path / "tokens.json", summary, starts)
    assert not list(tmp_path.iterdir())


def test_what_is_not_allowed_is_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PlanError, match=r"can't be written to .*: Permission denied"):
        save_summary(tmp_path / "tokens.json", Summary("<u2", 1, 1, 0, 0, 0.0), {tmp_path / "s": np.zeros(1, np.int64)})
