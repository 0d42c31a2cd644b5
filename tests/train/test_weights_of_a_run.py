"""Weights of another run, without what its optimizer remembers: its samples may be longer or shorter than they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint import resuming
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import my_tokens, small_job


def job_of(sequence: int, positions: str) -> JobSpec:
    job = small_job()
    return job.model_copy(update={"model": job.model.model_copy(update={"sequence": sequence, "positions": positions})})


def weights(replica: Replica) -> dict[str, Tensor]:
    return {name: values.detach() for stage in replica.stages.values() for name, values in stage.named_parameters()}


def trained_run(job: JobSpec, folder: Path) -> dict[str, Tensor]:
    """The weights after a step that is saved."""
    mesh = job_mesh(job, 0, torch.device("cpu"))
    replica = build(job, mesh)
    train_step(replica, 0, my_tokens(mesh, job, 0))
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(1, job.batch.global_batch_size, 0, {})
    writer.wait()
    return weights(replica)


@pytest.mark.parametrize("sequence", [8, 16, 64])
def test_samples_of_another_length_begin_with_the_same_weights(sequence: int, tmp_path: Path) -> None:
    trained = trained_run(job_of(16, "rotary"), tmp_path / "run")
    other = job_of(sequence, "rotary")
    mesh = job_mesh(other, 0, torch.device("cpu"))
    begun = begin(other, mesh, tmp_path / "other", str(tmp_path / "run"))
    result = weights(begun.replica)
    assert begun.step == 0
    assert result.keys() == trained.keys()
    assert all(torch.equal(values, trained[name]) for name, values in result.items())
    train_step(begun.replica, 0, my_tokens(mesh, other, 0))


def test_positions_with_vectors_of_their_own_are_as_many_as_they_were(tmp_path: Path) -> None:
    trained_run(job_of(16, "learned"), tmp_path / "run")
    other = job_of(32, "learned")
    with pytest.raises(PlanError, match=r"its model\.sequence is 16, and the job's 32; name a run of this model"):
        begin(other, job_mesh(other, 0, torch.device("cpu")), tmp_path / "other", str(tmp_path / "run"))


def test_a_run_that_goes_on_has_the_samples_that_it_had(tmp_path: Path) -> None:
    trained_run(job_of(16, "rotary"), tmp_path)
    other = job_of(32, "rotary")
    with pytest.raises(PlanError, match=r"its model\.sequence is 16, and the job's 32; begin anew"):
        begin(other, job_mesh(other, 0, torch.device("cpu")), tmp_path)


def test_ranks_meet_between_reading_a_checkpoint_and_their_next_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may read for longer than a collective may wait for it."""
    job = job_of(16, "rotary")
    trained_run(job, tmp_path)
    done, read, reduce = list[str](), resuming._read, resuming.all_reduce

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            done.append(name)
            return call(*given)

        return called

    monkeypatch.setattr(resuming, "_read", noted("read", read))
    monkeypatch.setattr(resuming, "meet", noted("meet", lambda *_: None))
    monkeypatch.setattr(resuming, "all_reduce", noted("all-reduce", reduce))
    assert begin(job, job_mesh(job, 0, torch.device("cpu")), tmp_path).step == 1
    assert done == ["read", "meet", "all-reduce"]


def test_a_run_of_broken_checkpoints_is_refused_with_what_is_wrong_with_each(tmp_path: Path) -> None:
    """By every command that takes weights of a run, and not in the name of one."""
    job = job_of(16, "rotary")
    trained_run(job, tmp_path / "run")
    (file,) = (tmp_path / "run").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PlanError) as refused:
        begin(job, job_mesh(job, 0, torch.device("cpu")), tmp_path / "other", str(tmp_path / "run"))
    assert refused.value.subject == f"weights of {tmp_path / 'run'}"
    broken, none_is_whole = refused.value.faults
    assert "rank-00000.safetensors has 100 bytes" in broken
    assert none_is_whole == "no checkpoint is whole; name the folder of another run"
