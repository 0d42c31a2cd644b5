"""A run goes on in its data where each source stands, and with no other data, whatever becomes of files and weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, DataPlace, Manifest, read_manifest, to_bytes
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.data import place as place_module
from shardwright.train.data.place import PlaceInData, StoredPlace, data_digest, taken_up
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.trainer import train
from support.cases import small_job
from support.ranks import run_on_mesh

SEQUENCE = 4


def job_of(folder: Path, weights: dict[str, float], seed: int = 3, **data: Any) -> JobSpec:
    sources = [{"path": str(folder / f"{name}.npy"), "weight": weight} for name, weight in weights.items()]
    answer = {"validation_share": 0.0, **data}
    answer |= {"path": sources[0]["path"]} if len(sources) == 1 else {"sources": sources}
    return make_job({"model": {"vocab": 1000, "sequence": SEQUENCE}, "data": answer, "run": {"seed": seed}})


def write(folder: Path, name: str, num_samples: int, dtype: str = "<u2") -> None:
    """Tokens of which each sample shows which it is, and of which source."""
    np.save(folder / f"{name}.npy", np.arange(num_samples * SEQUENCE + 1).astype(dtype) + 300 * (ord(name) - ord("a")))


def here(job: JobSpec, folder: Path) -> PlaceInData:
    return PlaceInData.at_beginning(prepare_tokens(job.data, job.model, job.run.seed, folder / "cache"), job)


def stored(place: PlaceInData, job: JobSpec, samples: int) -> StoredPlace:
    """As a checkpoint has it: through its bytes."""
    manifest = Manifest(
        step=1, samples=samples, optimizer_steps=1, job=job.model_dump(mode="json"), state={}, files=(),
        data=place.to_store(samples),
    )  # fmt: skip
    read = read_manifest(to_bytes(manifest), "manifest.json")
    return StoredPlace("checkpoints/step-1", read.job, read.samples, read.data)


def windows(place: PlaceInData, first: int, count: int) -> list[tuple[str, int]]:
    """Of each sample its source, and which of its windows it is."""
    rows = place.train_samples().batch(first, count)[:, 0].tolist()
    return [("abc"[row // 300], row % 300 // SEQUENCE) for row in rows]


@settings(max_examples=40, deadline=None)
@example(
    [(count, [weight, 1, 1], ["a", "b", "c"], 2) for count, weight in ((10, 6), (13, 8), (16, 6), (18, 7), (20, 5))]
)
@given(
    st.lists(
        st.tuples(st.integers(1, 25), st.lists(st.integers(1, 9), min_size=3, max_size=3), st.permutations("abc"),
                  st.integers(2, 3)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_no_sample_is_skipped_or_comes_again(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, list[int], list[str], int]]
) -> None:
    """Other weights, another order of the sources, one that is left out and comes back: in a first epoch of each,
    and into a second one."""
    folder = tmp_path_factory.mktemp("sources")
    for name in "abc":
        write(folder, name, 70)
    saved, samples = None, 0
    had: dict[str, list[int]] = {name: [] for name in "abc"}
    for count, weights, names, number in [(9, [1, 1, 1], ["a", "b", "c"], 3), *parts]:
        chosen = dict(zip(names[:number], map(float, weights), strict=False))
        job = job_of(folder, chosen)
        place = here(job, folder)
        if saved is not None:
            place, _ = taken_up(saved, place, job)
        for name, window in windows(place, samples, count):
            had[name].append(window)
        samples += count
        saved = stored(place, job, samples)
        assert saved.data is not None
        assert sum(source.had for source in saved.data.sources) == samples
        answer = {Path(source.path).stem: source.had for source in saved.data.sources}
        assert answer == {name: len(had[name]) for name in answer}
    straight = here(job_of(folder, {"a": 1.0, "b": 1.0, "c": 1.0}), folder)
    for name, source in zip("abc", straight.sources, strict=True):
        in_order = source.train_samples().batch(0, len(had[name]))[:, 0] % 300 // SEQUENCE
        assert had[name] == in_order.tolist()


def test_the_same_weights_go_on_in_the_same_mixture(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, 40)
    job, scaled = job_of(tmp_path, {"a": 0.7, "b": 0.3}), job_of(tmp_path, {"a": 7.0, "b": 3.0})
    whole = windows(here(job, tmp_path), 0, 60)
    place, lines = taken_up(stored(here(job, tmp_path), job, 13), here(scaled, tmp_path), scaled)
    assert (place.begun, lines, windows(place, 13, 47)) == (0, [], whole[13:])


def test_what_is_had_is_told(tmp_path: Path) -> None:
    """After 32 samples at 1 to 1, 32 more at 9 to 1."""
    for name in "ab":
        write(tmp_path, name, 64)
    job, other = job_of(tmp_path, {"a": 0.5, "b": 0.5}), job_of(tmp_path, {"a": 0.9, "b": 0.1})
    place, lines = taken_up(stored(here(job, tmp_path), job, 32), here(other, tmp_path), other)
    assert place.had(64) == [45, 19]
    assert "a.npy: 45 in this run, of 64" in place.described(64)[0]
    assert "a.npy goes on behind the 16 of its samples" in lines[0] and "is skipped or comes again" in lines[2]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "grown": ({}, "had 161 tokens to train on, and"),
    "edited": ({}, "has 161 tokens to train on, as many as before, and they are others"),
    "share": ({"validation_share": 0.2}, "data.validation_share was 0.0 and is 0.2"),
    "other file": ({}, "b.npy has 121"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_data_are_refused_or_begin(name: str, tmp_path: Path) -> None:
    write(tmp_path, "a", 40)
    write(tmp_path, "b", 30)
    fields, words = CHANGES[name]
    job = job_of(tmp_path, {"a": 1.0})
    saved = stored(here(job, tmp_path), job, 17)
    if name == "grown":
        write(tmp_path, "a", 60)
    if name == "edited":
        ids = np.load(tmp_path / "a.npy")
        ids[80] += 1
        np.save(tmp_path / "a.npy", ids)
    path = {"b" if name == "other file" else "a": 1.0}
    asked = job_of(tmp_path, path, **fields)
    with pytest.raises(PlanError) as caught:
        taken_up(saved, here(asked, tmp_path), asked)
    (fault,) = caught.value.faults
    assert words in fault and "behind 17 samples of other data" in fault and "data.begin_new=true" in fault
    asked = job_of(tmp_path, path, begin_new=True, **fields)
    now = here(asked, tmp_path)
    place, lines = taken_up(saved, now, asked)
    assert windows(place, 17, 20) == windows(now, 0, 20)
    assert "begins at its first sample from here on (data.begin_new)" in lines[0]
    again, lines = taken_up(stored(place, asked, 22), here(asked, tmp_path), asked)
    assert (windows(again, 22, 20), lines) == (windows(now, 5, 20), [])


def test_a_new_source_begins_where_it_is_asked_for(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, 40)
    job, both = job_of(tmp_path, {"a": 1.0}), {"b": 1.0, "a": 1.0}
    saved = stored(here(job, tmp_path), job, 10)
    asked = job_of(tmp_path, both)
    with pytest.raises(PlanError, match=r"b\.npy is new, with 161 tokens"):
        taken_up(saved, here(asked, tmp_path), asked)
    asked = job_of(tmp_path, both, begin_new=True)
    place, _ = taken_up(saved, here(asked, tmp_path), asked)
    had = windows(place, 10, 20)
    assert [w for name, w in had if name == "a"] == [w for _, w in windows(here(job, tmp_path), 10, 10)]
    assert place.had(30) == [10, 20]


def test_the_same_tokens_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    write(tmp_path, "a", 40)
    job = job_of(tmp_path, {"a": 1.0})
    saved = stored(here(job, tmp_path), job, 10)
    (tmp_path / "moved").mkdir()
    write(tmp_path / "moved", "a", 40, dtype="<i4")
    moved = job_of(tmp_path / "moved", {"a": 1.0})
    place, lines = taken_up(saved, here(moved, tmp_path), moved)
    assert (place.begun, lines) == (0, [])


def test_chats_are_the_same_where_their_lengths_are(tmp_path: Path) -> None:
    def digest(rows: list[tuple[str, str]]) -> str:
        path = tmp_path / "c.jsonl"
        path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in rows))
        data = {"path": str(path), "chats": True, "separate_documents": True, "validation_share": 0.0, "workers": 1}
        job = make_job({"model": {"vocab": 256, "sequence": 16}, "data": data})
        tokens = prepare_tokens(job.data, job.model, 1, tmp_path / "cache")
        assert isinstance(tokens, TokenFiles)
        return data_digest(tokens)

    rows = [("one", "two"), ("three\n", "four"), ("five", "six")]
    assert digest(rows) == digest(rows)
    assert digest(rows) != digest([("one", "two\nthree"), ("", "four"), ("five", "six")])


def test_large_files_are_told_apart_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "_WHOLE_TOKENS", 100)
    monkeypatch.setattr(place_module, "_NUM_BLOCKS", 5)
    monkeypatch.setattr(place_module, "_BLOCK_TOKENS", 8)
    write(tmp_path, "a", 40)
    before = here(job_of(tmp_path, {"a": 1.0}), tmp_path).digests
    for at in (0, 160):
        ids = np.arange(161, dtype=np.uint16)
        ids[at] = 700
        np.save(tmp_path / "a.npy", ids)
        assert here(job_of(tmp_path, {"a": 1.0}), tmp_path).digests != before
    write(tmp_path, "a", 41)
    assert here(job_of(tmp_path, {"a": 1.0}), tmp_path).digests != before


def test_a_checkpoint_that_does_not_say_goes_on(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, 64)
    job, other = job_of(tmp_path, {"a": 0.5, "b": 0.5}), job_of(tmp_path, {"a": 0.9, "b": 0.1})
    old = StoredPlace("checkpoints/step-1", job.model_dump(mode="json"), 32, None)
    place, lines = taken_up(old, here(job, tmp_path), job)
    assert (place.begun, len(lines)) == (0, 1) and "these are taken for the same" in lines[0]
    place, lines = taken_up(old, here(other, tmp_path), other)
    assert place.had(64) == [45, 19] and len(lines) == 3
    other = job_of(tmp_path, {"a": 0.9, "b": 0.1}, begin_new=True)
    place, _ = taken_up(old, here(other, tmp_path), other)
    assert place.had(64) == [29, 3]


@pytest.mark.parametrize(
    ("of_data", "of_source", "message"),
    [
        ({"begun": 9}, {}, "its data begin with sample 9"),
        ({}, {"had": 2**62 - 1}, "4,611,686,018,427,387,903 samples of source 0 were had"),
        (
            {},
            {"first": 2**62 - 8, "had": 2**62 - 1},
            "first sample of source 0 4,611,686,018,427,387,896, which no run",
        ),
        ({}, {"first": 5, "had": 4}, "4 samples of source 0 were had, 5 of them before the last 8"),
        ({"begun": 8}, {"had": 8}, "8 samples of source 0 were had, 0 of them before the last 0"),
    ],
)
def test_a_place_where_no_run_stands_is_broken(
    of_data: dict[str, int], of_source: dict[str, int], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "a", 40)
    job = job_of(tmp_path, {"a": 1.0})
    place = here(job, tmp_path).to_store(8).model_dump()
    place |= of_data | {"sources": tuple(source | of_source for source in place["sources"])}
    manifest = Manifest(
        step=1, samples=8, optimizer_steps=1, job=job.model_dump(mode="json"), state={}, files=(),
        data=DataPlace.model_validate(place),
    )  # fmt: skip
    with pytest.raises(BrokenCheckpointError, match=message):
        read_manifest(to_bytes(manifest), "manifest.json")


def goes_on(mesh: Mesh, job: JobSpec, folder: Path) -> None:
    train(job, mesh, folder / "run")
    manifest = manifest_of(open_storage(str(folder / "run" / "checkpoints")), 2)
    assert manifest.data is not None and [source.had for source in manifest.data.sources] == [16]
    write(folder, "a", 64)
    longer = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"steps": 3})})
    with pytest.raises(PlanError, match="had 161 tokens to train on, and"):
        train(longer, mesh, folder / "run")
    begins = longer.model_copy(update={"data": job.data.model_copy(update={"begin_new": True})})
    assert train(begins, mesh, folder / "run").steps == 3
    manifest = manifest_of(open_storage(str(folder / "run" / "checkpoints")), 3)
    assert manifest.data is not None and (manifest.data.begun, manifest.samples) == (16, 24)
    assert [(source.had, source.weight) for source in manifest.data.sources] == [(8, 1.0), (16, 0.0)]


def test_a_run_is_refused_a_file_that_grew(tmp_path: Path) -> None:
    write(tmp_path, "a", 40)
    fields = small_job(batch=8).model_dump(mode="json", exclude_unset=True)
    given: dict[str, Any] = {
        "model": {"vocab": 1000, "sequence": SEQUENCE}, "checkpoint": {"every_steps": 1},
        "data": {"path": str(tmp_path / "a.npy"), "validation_share": 0.0}, "optimizer": {"steps": 2},
    }  # fmt: skip
    job = make_job(fields | {name: fields.get(name, {}) | values for name, values in given.items()})
    run_on_mesh(job, goes_on, job, tmp_path)
