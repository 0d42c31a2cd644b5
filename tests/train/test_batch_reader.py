"""Batches are read ahead: the same ones, in time, and nothing is left when it ends."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.data.batch_reader import BatchReader, my_share
from shardwright.train.data.samples import Samples
from shardwright.train.data.token_stream import TokenSpan
from shardwright.train.launch import preemption
from shardwright.train.trainer import train
from shardwright.train.training_run import TrainingRun
from support.cases import small_job
from support.ranks import run_on_mesh

BATCH = 8


class Watched(Samples):
    """Samples that take a while, may fail, and say what was read, and by whom."""

    delay_s = 0.0
    fails_at = -1

    def batch(self, first: int, count: int) -> np.ndarray:
        self.log.append((first, threading.current_thread().name))
        time.sleep(self.delay_s)
        if first == self.fails_at:
            raise OSError(5, "Input/output error", "tokens.bin")
        return super().batch(first, count)


@pytest.fixture
def job() -> JobSpec:
    return small_job(batch=BATCH)


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(MeshNeeds(PlanSpec()), 0, torch.device("cpu"), 30)


@pytest.fixture
def samples(tmp_path: Path, job: JobSpec) -> Watched:
    path = tmp_path / "tokens.bin"
    (np.arange(16 * 50 + 1) % 61).astype("<u2").tofile(path)
    made = Watched([TokenSpan(path, "<u2", 0, 16 * 50 + 1)], job.model.sequence, seed=3)
    made.log = []
    return made


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def reads(samples: Watched) -> list[int]:
    return [first for first, _ in samples.log]


def test_batches_come_in_their_order_and_each_is_read_once(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    with BatchReader(samples, job, mesh, 9) as batches:
        for i in range(9):
            result = batches.batch(i, i * BATCH)
            assert batches.batch(i, i * BATCH) is result  # asked for again, as by a step that is repeated
            assert torch.equal(result, torch.from_numpy(Samples.batch(samples, i * BATCH, BATCH)))
    assert reads(samples) == [i * BATCH for i in range(9)]  # and nothing behind the last one
    assert {name for _, name in samples.log} == {"batches"}


@settings(max_examples=30, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=8))
def test_whatever_is_asked_for_is_what_comes(asked: list[tuple[int, int]], tmp_path_factory) -> None:
    """After a rewind, a skip, in any order."""
    job, mesh = small_job(batch=BATCH), make_mesh(MeshNeeds(PlanSpec()), 0, torch.device("cpu"), 30)
    path = tmp_path_factory.getbasetemp() / "any.bin"
    (np.arange(801) % 61).astype("<u2").tofile(path)
    samples = Samples([TokenSpan(path, "<u2", 0, 801)], job.model.sequence, seed=3)
    with BatchReader(samples, job, mesh, 5) as batches:
        for number, consumed in asked:
            assert torch.equal(batches.batch(number, consumed), my_share(samples, consumed, job, mesh))


def test_the_next_one_is_read_while_this_one_is_computed_with(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    samples.delay_s, waited_s = 0.1, []
    with BatchReader(samples, job, mesh, 5) as batches:
        for i in range(5):
            start_s = time.perf_counter()
            batches.batch(i, i * BATCH)
            waited_s.append(time.perf_counter() - start_s)
            time.sleep(0.15)  # the step
    assert waited_s[0] >= 0.1
    assert sorted(waited_s[1:])[1] < 0.05, waited_s


def test_an_error_comes_where_the_step_would_have_read(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    samples.fails_at = 2 * BATCH
    with BatchReader(samples, job, mesh, 9) as batches:
        batches.batch(0, 0)
        batches.batch(1, BATCH)
        time.sleep(0.05)  # it has failed by now
        with pytest.raises(OSError, match=r"Input/output error: 'tokens.bin'"):
            batches.batch(2, 2 * BATCH)
        samples.fails_at = -1
        assert batches.batch(2, 2 * BATCH).shape == (BATCH, 17)  # a disk that came back


def test_an_error_of_what_nobody_asks_for_is_nobodys(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    samples.fails_at = BATCH
    with BatchReader(samples, job, mesh, 9) as batches:
        batches.batch(0, 0)
        batches.batch(0, 4 * BATCH)
    assert reads(samples) == [0, BATCH, 4 * BATCH, 5 * BATCH]


def failing_step(samples: Watched, job: JobSpec, mesh: Mesh, delay_s: float) -> None:
    """Reads that take a while, and a step that fails meanwhile."""
    with BatchReader(samples, job, mesh, 9) as batches:
        samples.delay_s = delay_s
        batches.batch(0, 0)
        raise RuntimeError("the step failed")


def test_the_thread_ends_with_an_exception(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    with pytest.raises(RuntimeError, match="the step failed"):
        failing_step(samples, job, mesh, 0.05)


def test_a_disk_that_gives_no_answer_keeps_back_no_error(
    samples: Watched, job: JobSpec, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.train.data.batch_reader._PATIENCE_S", 0.05)
    start_s = time.perf_counter()
    with pytest.raises(RuntimeError, match="the step failed"):
        failing_step(samples, job, mesh, 1.0)
    assert time.perf_counter() - start_s < 1.6  # one read, and not the one behind it
    while any(thread.name == "batches" for thread in threading.enumerate()) and time.perf_counter() < start_s + 10:
        time.sleep(0.01)  # it was told to end, and does once its read is over


def test_one_that_was_not_asked_has_no_thread(samples: Watched, job: JobSpec, mesh: Mesh) -> None:
    with BatchReader(samples, job, mesh, 9):
        assert not any(thread.name == "batches" for thread in threading.enumerate())


def job_on_text(folder: Path) -> JobSpec:
    """Six steps on bytes of text, with an evaluation, and checkpoints when it is asked to leave."""
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = small_job(batch=4).model_dump(mode="json", exclude_unset=True)
    given = {
        "model": {"vocab": 256}, "data": {"path": str(text)}, "optimizer": {"steps": 6},
        "run": {"eval_batches": 2, "log_every": 1, "eval_every": 3, "sample_tokens": 0},
        "checkpoint": {"every_steps": 6},
    }  # fmt: skip
    return make_job(fields | {name: fields.get(name, {}) | values for name, values in given.items()})


def run_of(mesh: Mesh, job: JobSpec, folder: Path, leaves_after: int = 0, fails_at: int = -1) -> TrainingRun:
    """A run that is asked to leave, or whose data can't be read at some sample."""
    runs: list[TrainingRun] = []
    begin, batch = TrainingRun.__init__, Samples.batch

    def begun(run: TrainingRun, *args: Any) -> None:
        begin(run, *args)
        runs.append(run)

    def read(samples: Samples, first: int, count: int) -> np.ndarray:
        if first == fails_at and samples.shuffle:
            raise OSError(5, "Input/output error", "tokens.bin")
        return batch(samples, first, count)

    with (
        patch.object(TrainingRun, "__init__", begun), patch.object(Samples, "batch", read),
        patch.object(preemption, "is_asked", lambda: 0 < leaves_after == runs[0].done + 1),  # asked within a step
    ):  # fmt: skip
        try:
            train(mesh=mesh, job=job, folder=folder)
        finally:
            assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    return runs[0]


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {f"{box.name} {box.box}": box.values.clone() for box in SavedState(run.replica, run.mesh).held()}


def left_and_went_on(mesh: Mesh, job: JobSpec, folder: Path) -> None:
    straight = run_of(mesh, job, folder / "straight")
    left = run_of(mesh, job, folder / "left", leaves_after=3)
    assert (left.done, left.samples) == (3, 12)
    manifest = manifest_of(open_storage(str(folder / "left" / "checkpoints")), 3)
    assert (manifest.samples, manifest.passed_over) == (12, 0)  # and not what was read ahead
    went_on = run_of(mesh, job, folder / "left")
    assert went_on.losses == straight.losses[3:]
    assert went_on.held_out.losses == straight.held_out.losses and straight.held_out.losses
    one, other = weights(straight), weights(went_on)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_leaves_goes_on_behind_the_step_that_was_done(tmp_path: Path) -> None:
    job = job_on_text(tmp_path)
    run_on_mesh(job, left_and_went_on, job, tmp_path)


def failed_to_read(mesh: Mesh, job: JobSpec, folder: Path) -> None:
    with pytest.raises(OSError, match=r"Input/output error: 'tokens.bin'"):
        run_of(mesh, job, folder, fails_at=16)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]  # all that could be read


def test_a_run_whose_data_break_does_the_steps_before(tmp_path: Path) -> None:
    job = job_on_text(tmp_path)
    run_on_mesh(job, failed_to_read, job, tmp_path / "run")
