"""Sets of the user's own: evaluated by name beside what is held out, and the best checkpoint by one of them is kept."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardwright.api.training import train_job
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.kept import best_of_sets, best_step, manifest_of, steps_kept
from shardwright.train.checkpoint.manifest import Manifest, MeasuredLoss, StateHealth
from shardwright.train.checkpoint.other_job import differences, refuse_other_model
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.data.prepare import prepare_validation
from shardwright.train.data.source_files import trained_on_notes
from shardwright.train.held_out import HeldOutSets
from shardwright.train.trainer import train
from support.cases import small_job
from support.ranks import run_on_mesh


def job_of(folder: Path, **given: dict[str, Any]) -> JobSpec:
    """A few steps on repeated bytes, with a set like these and one of other letters."""
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    (folder / "same.txt").write_text("one two three four five six seven eight nine ten\n" * 3)
    (folder / "other.jsonl").write_text("".join(json.dumps({"body": "ZYXW" * 9}) + "\n" for _ in range(5)))
    sets = [
        {"name": "same", "path": str(folder / "same.txt")},
        {"name": "other", "path": str(folder / "other.jsonl"), "text_field": "body"},
    ]
    fields = small_job(batch=4).model_dump(mode="json", exclude_unset=True)
    more: dict[str, dict[str, Any]] = {
        "model": {"vocab": 256}, "data": {"path": str(folder / "text.txt"), "validation": sets},
        "optimizer": {"steps": 6}, "run": {"eval_every": 3, "eval_batches": 100}, "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    for source in (more, given):
        fields |= {name: fields.get(name, {}) | values for name, values in source.items()}
    return make_job(fields)


def trained(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[dict[str, float | None], dict[str, float | None]]:
    result = train(job, mesh, folder)
    return result.validation_losses, result.unigram_losses


def test_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    ((losses, baselines),) = run_on_mesh(job, trained, job, tmp_path / "run")
    assert set(losses) == set(baselines) == {"held-out", "same", "other"}
    assert baselines["other"] > baselines["same"]  # type: ignore[operator]  # letters that were never seen
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "validation_losses" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert evaluated[-1]["validation_losses"] == {name: losses[name] for name in ("same", "other")}
    assert evaluated[-1]["validation_loss"] == losses["held-out"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("validation_loss/other")] == [3, 6]


def test_a_set_alone_needs_no_share(tmp_path: Path) -> None:
    job = job_of(tmp_path, data={"validation_share": 0.0})
    ((losses, _),) = run_on_mesh(job, trained, job, tmp_path / "run")
    assert set(losses) == {"same", "other"}
    assert job.data.evaluated == ["same", "other"]


def best_is_kept(mesh: Mesh, job: JobSpec, folder: Path, losses: list[float]) -> list[int]:
    """A run whose losses on a set are these, step after step."""
    own = iter(losses)

    def measure(sets: HeldOutSets, replica: Any, step: int, names: Any) -> dict[str, float | None]:
        sets.step, sets.losses = step, {name: next(own) if name == "same" else 9.0 for name in names}
        return sets.losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldOutSets, "measure", measure)
        train(job, mesh, folder)
    return steps_kept(open_storage(str(folder / "checkpoints")))


def test_the_best_by_a_set_is_kept(tmp_path: Path) -> None:
    job = job_of(tmp_path, checkpoint={"keep_best": "same", "keep_last": 2}, run={"eval_every": 0})
    losses = [3.0, 1.0, 2.0, 1.5, 1.0, 4.0]
    (kept,) = run_on_mesh(job, best_is_kept, job, tmp_path / "run", losses)
    assert kept == [6, 5, 2]
    longer = job_of(
        tmp_path, checkpoint={"keep_best": "same", "keep_last": 2}, run={"eval_every": 0}, optimizer={"steps": 8}
    )
    (kept,) = run_on_mesh(longer, best_is_kept, longer, tmp_path / "run", [0.5, 7.0])
    assert kept == [8, 7]


def test_a_checkpoint_is_measured_when_it_is_written(tmp_path: Path) -> None:
    job = job_of(tmp_path, checkpoint={"every_steps": 2, "keep_best": "other"}, run={"eval_every": 0})
    run_on_mesh(job, trained, job, tmp_path / "run")
    storage = open_storage(str(tmp_path / "run" / "checkpoints"))
    losses = {step: set(manifest_of(storage, step).losses) for step in steps_kept(storage)}
    assert losses[4] == {"other"} and losses[6] == {"held-out", "same", "other"}
    shown = CliRunner().invoke(cli, ["checkpoint", "show", str(tmp_path / "run"), "--step", "4"])
    assert shown.exit_code == 0, shown.output
    assert "loss on other: " in shown.output and f"data: 16 samples of {tmp_path / 'text.txt'}, " in shown.output


def test_a_set_is_looked_for_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "own.txt").write_text("text")
    (tmp_path / "job.toml").write_text('[[data.validation]]\nname = "own"\npath = "own.txt"\n')
    assert load_job(str(tmp_path / "job.toml")).data.validation[0].path == str(tmp_path / "own.txt")


@given(
    st.dictionaries(st.integers(1, 50), st.one_of(st.none(), st.floats(-5, 5), st.sampled_from([math.nan, math.inf])))
)
def test_the_best_is_a_number(losses: dict[int, float | None]) -> None:
    numbers = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    best = best_step(losses)
    assert (best is None) == (not numbers)
    if best is not None:
        assert all(numbers[best] < loss or (numbers[best] == loss and best <= step) for step, loss in numbers.items())


def test_losses_compare_on_the_same_set_alone() -> None:
    def manifest(
        digest: str, loss: float, cause: Any = "", name: str = "code", keep_best: str | None = None
    ) -> Manifest:
        job = {"checkpoint": {"keep_best": name if keep_best is None else keep_best}}
        losses = {name: MeasuredLoss(loss=loss, set_digest=digest * 32)}
        return Manifest(
            step=1, samples=0, optimizer_steps=0, job=job, state={}, files=(), losses=losses,
            health=StateHealth(cause=cause),
        )  # fmt: skip

    assert best_of_sets({1: manifest("a", 1.0), 2: manifest("a", 2.0)}) == [1]
    assert best_of_sets({1: manifest("a", 1.0), 2: manifest("b", 2.0), 3: manifest("b", 3.0)}) == [1, 2]
    assert best_of_sets({1: manifest("a", 1.0, name="web"), 2: manifest("a", 2.0)}) == [1]  # the same by another name
    assert best_of_sets({1: manifest("a", 1.0, cause="not finite"), 2: manifest("a", 2.0)}) == [2]
    assert best_of_sets({1: manifest("a", 1.0, cause="spike"), 2: manifest("a", 2.0)}) == [1]
    assert best_of_sets({1: manifest("a", 1.0, keep_best=""), 2: manifest("b", 2.0, keep_best="")}) == []
    assert best_of_sets({1: manifest("a", 1.0), 2: manifest("a", 2.0, keep_best="")}) == [1]
    assert best_of_sets({}) == []


def test_a_set_that_is_another_now_has_another_digest(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        job = job_of(tmp_path)
        (tmp_path / "same.txt").write_text(text)
        own = prepare_validation(job.data, job.model, tmp_path / "cache")
        sets = HeldOutSets.__new__(HeldOutSets)
        sets.readers, sets._digests, sets._job = {"same": own["same"].in_file_order()}, {}, job
        sets.step, sets.losses = 3, {"same": 1.0}
        return sets.to_store(3)["same"].set_digest

    text = "one two three four five six seven eight nine ten\n" * 3
    assert digest(text) == digest(text)
    assert len({digest(text), digest(text + text), digest(text.upper())}) == 3


def test_losses_that_are_no_numbers_are_not_stored_and_are_told(tmp_path: Path) -> None:
    sets = HeldOutSets.__new__(HeldOutSets)
    sets.step, sets.losses, sets._digests = 3, {"a": 1.0, "b": math.nan, "c": None}, {"a": "0" * 32}
    assert set(sets.to_store(3)) == {"a"} and sets.to_store(4) == {}
    worst = sets.worst(3)
    assert worst is not None and math.isnan(worst)
    assert sets.worst(4) is None


def test_a_set_that_is_trained_on_is_told(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "more" / f"{name}.txt").write_text(name * 100)
    sets = [{"name": "all", "path": str(tmp_path / "more")}, {"name": "own", "path": str(tmp_path / "more" / "a.txt")}]
    data = DataSpec.model_validate({"path": str(tmp_path / "more" / "[bc].txt"), "validation": sets})
    (note,) = trained_on_notes(data)
    assert "b.txt and 1 more of the set all is trained on, too" in note


def test_what_does_not_go_together(tmp_path: Path) -> None:
    def faults(**given: Any) -> str:
        with pytest.raises(PlanError) as caught:
            make_job(given)
        return "\n".join(caught.value.faults)

    one = {"name": "code", "path": "a"}
    assert "2 sets of data.validation are called 'code'" in faults(data={"validation": [one, one]})
    assert "is called 'held-out', as is" in faults(data={"validation": [one | {"name": "held-out"}]})
    assert "data.validation[0].chats is true, and chats that" in faults(data={"validation": [one | {"chats": True}]})
    assert "data.validation" in faults(data={"validation": [one | {"name": "a b"}]})
    for section in ("validation", "sources"):  # and not the default text
        assert f"data.{section}.0.path is missing" in faults(data={section: [{"format": "text"}]})
    on = {"every_steps": 3}
    assert "'web' is no set that is evaluated (evaluated are held-out, code)" in faults(
        data={"validation": [one]}, checkpoint=on | {"keep_best": "web"}
    )
    assert "(nothing is evaluated)" in faults(data={"validation_share": 0.0}, checkpoint=on | {"keep_best": "held-out"})
    assert "and no checkpoints are written" in faults(checkpoint={"keep_best": "held-out"})
    job = make_job({"data": {"validation": [one | {"path": str(tmp_path / "gone")}]}})
    with pytest.raises(PlanError, match=r"data.validation 'code': there is no file or folder"):
        prepare_validation(job.data, job.model, tmp_path / "cache")


def test_a_set_takes_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40, dtype=np.uint16))
    job = make_job(
        {
            "model": {"vocab": 100, "sequence": 8},
            "data": {"validation": [{"name": "ids", "path": str(tmp_path / "ids.npy")}], "separate_documents": True},
        }
    )
    own = prepare_validation(job.data, job.model, tmp_path / "cache")
    assert own["ids"].num_train_tokens == 40 and own["ids"].separate_documents
    assert own["ids"].in_file_order().batch(0, 1)[0, 1:].tolist() == list(range(1, 9))


def test_files_that_are_not_there_are_told_before_text_is_read(tmp_path: Path) -> None:
    """Of all sets and sources at once, and so is a place for checkpoints; nothing stays of a run that never began."""
    (tmp_path / "text.txt").write_text("one two three four " * 400)
    fields: dict[str, Any] = {
        "model": {"vocab": 256, "sequence": 16, "layers": 1, "hidden": 16, "heads": 2},
        "batch": {"global_batch_size": 2}, "optimizer": {"steps": 1}, "run": {"folder": str(tmp_path / "run")},
        "data": {
            "sources": [{"path": str(tmp_path / name), "weight": 1} for name in ("text.txt", "no.txt")],
            "validation": [{"name": "mine", "path": str(tmp_path / "neither.txt")}],
        },
    }  # fmt: skip
    with pytest.raises(PlanError) as refused:
        train_job(make_job(fields))
    first, second = refused.value.faults
    assert first.startswith("data.sources[1]: there is no file or folder ")
    assert second.startswith("data.validation 'mine': there is no file or folder ")
    assert not (tmp_path / "run").exists()
    fields["data"] = {"path": str(tmp_path / "text.txt")}
    fields["checkpoint"] = {"path": str(tmp_path / "text.txt" / "kept"), "every_steps": 1}
    with pytest.raises(PlanError, match=r"checkpoint\.path .*text\.txt/kept can't be made"):
        train_job(make_job(fields))
    assert not (tmp_path / "run").exists()


def test_what_changes_about_checkpoints_is_told(tmp_path: Path) -> None:
    """Another set to keep the best by; and samples of another length, with which the weights can be taken along."""
    before = job_of(tmp_path, checkpoint={"keep_best": "same"}).model_dump(mode="json")
    (note,) = differences(before, job_of(tmp_path, checkpoint={"keep_best": "other"}))
    assert note.startswith(
        'note: checkpoint.keep_best is "other" from here on; it was "same"; what was best by that stays'
    )
    (note,) = differences(before, job_of(tmp_path, checkpoint={"keep_best": "same"}, optimizer={"name": "lion"}))
    assert note == 'note: optimizer.name is "lion" from here on; it was "adamw"'
    manifest = Manifest(step=1, samples=0, optimizer_steps=0, job=before, state={}, files=())
    longer = job_of(tmp_path, model={"sequence": 2 * before["model"]["sequence"]})
    with pytest.raises(PlanError, match=r"another run\.folder, with its weights by --from"):
        refuse_other_model(manifest, longer, open_storage(str(tmp_path)), weights_alone=False)
    refuse_other_model(manifest, longer, open_storage(str(tmp_path)), weights_alone=True)
