"""Processes of the suite share what they compute, and what they read is what was computed."""

import json
from pathlib import Path

import pytest

import shardwright as sw
from support import computed_once
from support.computed_once import FOLDER


@pytest.mark.usefixtures("searched_once")
def test_a_search_that_another_process_has_made_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(computed_once, "_LONG_S", 0.0)  # what is kept hangs on no machine's speed

    def answers() -> list[str]:
        monkeypatch.setattr(computed_once, "_results", {})  # as in a new process
        job = sw.load("tiny-llama", devices=8, device="h100-sxm")
        plans = job.plan(keep=["plan.pp=1"])
        return [json.dumps(rows) for rows in (plans.rows(), plans.dicts(), job.estimate().to_dict())]

    first = answers()
    kept = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir() if not file.suffix}
    assert kept and answers() == first
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir() if not file.suffix} == kept
    for name in kept:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(EOFError):  # it is read indeed
        answers()
