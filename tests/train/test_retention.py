"""Which checkpoints stay: over any history of good and bad steps the last healthy one does."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.checkpoint import CheckpointSpec
from shardwright.train.checkpoint.kept import (
    healthy_first,
    in_order_to_load,
    make_whole,
    manifest_of,
    mark_unhealthy,
    remove_old,
    steps_kept,
    steps_to_remove,
)
from shardwright.train.checkpoint.manifest import (
    HEALTHY,
    LATEST,
    Manifest,
    StateHealth,
    data_file,
    digest_of,
    folder_name,
    in_words,
    to_bytes,
)
from shardwright.train.checkpoint.storage import LocalStorage, open_storage
from support.cases import small_job

RUINED = StateHealth(cause="not finite", sentence="the loss is nan in step 5")
SPIKE = StateHealth(cause="spike", sentence="the loss is 9.0")


@given(
    healthy=st.lists(st.booleans(), min_size=1, max_size=40),
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 3, 7]),
    pinned=st.sets(st.integers(1, 40), max_size=3),
)
def test_the_last_healthy_one_is_never_removed(
    healthy: list[bool], keep_last: int, keep_every: int, pinned: set[int]
) -> None:
    """A checkpoint each step, and after each what need not stay goes: as a run does it."""
    spec = CheckpointSpec(keep_last=keep_last, keep_every=keep_every)
    there = list[int]()
    for step in range(1, len(healthy) + 1):
        there.append(step)
        gone = steps_to_remove(there, step, spec, lambda of: healthy[of - 1], pinned)
        assert gone == sorted(gone)
        there = [kept for kept in there if kept not in gone]
        good = [of for of in range(1, step + 1) if healthy[of - 1]]
        assert set(good[-keep_last:]) <= set(there), "the newest healthy ones stay"
        assert step in there
        for_ever = {of for of in range(1, step + 1) if (keep_every and of % keep_every == 0) or of in pinned}
        assert for_ever <= set(there)
        assert len(set(there) - for_ever) <= keep_last + 1, "a run that goes wrong does not fill the disk"
        if all(healthy[:step]):
            assert set(there) - for_ever <= set(range(step - keep_last + 1, step + 1)), "as many as were asked for"


@given(st.dictionaries(st.integers(1, 99), st.booleans(), min_size=1), st.integers(0, 99))
def test_later_ones_are_left_alone(healthy: dict[int, bool], newest: int) -> None:
    gone = steps_to_remove(list(healthy), newest, CheckpointSpec(keep_last=1), healthy.__getitem__)
    assert all(step < newest for step in gone)


@given(st.dictionaries(st.integers(1, 99), st.booleans()))
def test_the_newest_healthy_one_is_looked_at_first(healthy: dict[int, bool]) -> None:
    order = healthy_first(list(healthy), healthy.__getitem__)
    good = sorted((step for step in healthy if healthy[step]), reverse=True)
    assert order == [*good, *sorted(set(healthy) - set(good), reverse=True)]


def test_few_manifests_are_read() -> None:
    """A run may keep thousands for ever, and what is asked of each is a file."""
    asked = list[int]()

    def is_healthy(step: int) -> bool:
        asked.append(step)
        return True

    spec = CheckpointSpec(keep_last=2, keep_every=1)
    assert steps_to_remove(range(1, 1000), 999, spec, is_healthy) == []
    assert asked == [999, 998]


def written(folder: Path, step: int, health: StateHealth = HEALTHY) -> LocalStorage:
    """A checkpoint of no files in a folder."""
    storage = open_storage(str(folder))
    assert isinstance(storage, LocalStorage)
    manifest = Manifest(
        step=step, samples=step, optimizer_steps=step, job=small_job().model_dump(mode="json"), state={},
        health=health, files=(),
    )  # fmt: skip
    storage.write(f"{folder_name(step)}/{data_file(0)}", [b"boxes"])
    make_whole(storage, manifest, 0)
    remove_old(storage, CheckpointSpec(keep_last=2), step)
    return storage


def latest(folder: Path) -> str:
    return (folder / LATEST).read_text().strip()


def test_a_run_that_went_wrong_keeps_what_was_good(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        storage = written(tmp_path, step)
    for step in range(40, 100, 10):
        written(tmp_path, step, RUINED)
    assert steps_kept(storage) == [90, 30, 20]
    assert latest(tmp_path) == folder_name(30)
    assert in_order_to_load(storage, steps_kept(storage)) == [30, 20, 90]


def test_a_loss_above_its_band_may_be_taken(tmp_path: Path) -> None:
    written(tmp_path, 10)
    storage = written(tmp_path, 20, SPIKE)
    assert in_order_to_load(storage, [10, 20]) == [10, 20]
    assert in_order_to_load(storage, [10, 20], takes_spikes=True) == [20, 10]


def test_what_was_found_out_later_is_kept(tmp_path: Path) -> None:
    """All else in the manifest stays as it is, and the newest that is healthy is the latest."""
    for step in (10, 20):
        storage = written(tmp_path, step)
    before = manifest_of(storage, 20)
    mark_unhealthy(storage, 20, RUINED)
    after = manifest_of(storage, 20)
    assert after == before.model_copy(update={"health": RUINED})
    assert latest(tmp_path) == folder_name(10)
    mark_unhealthy(storage, 10, RUINED)
    assert not (tmp_path / LATEST).exists()
    assert in_order_to_load(storage, [10, 20]) == [20, 10]


def test_an_old_manifest_counts_as_healthy(tmp_path: Path) -> None:
    storage = written(tmp_path, 10)
    printed = json.loads(to_bytes(manifest_of(storage, 10)).split(b"\n")[0])
    del printed["health"]
    body = json.dumps(printed).encode() + b"\n"
    (tmp_path / folder_name(10) / "manifest.json").write_bytes(body + digest_of(body).encode() + b"\n")
    assert manifest_of(storage, 10).health == HEALTHY


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=1000))
def test_a_sentence_from_a_file_is_one_line(sentence: str) -> None:
    line = in_words(StateHealth(cause="spike", sentence=sentence))
    assert line.translate({0x200C: "", 0x200D: ""}).isprintable(), "joiners belong to some scripts"
    assert "\x1b" not in line and "\n" not in line


@pytest.mark.parametrize("damaged", [b"", b"{}"])
def test_a_damaged_one_neither_counts_nor_hides(damaged: bytes, tmp_path: Path) -> None:
    """It does not push out a healthy one; and who loads it first says that it is not whole."""
    for step in (10, 20):
        storage = written(tmp_path, step)
    (tmp_path / folder_name(20) / "manifest.json").write_bytes(damaged)
    assert in_order_to_load(storage, [10, 20]) == [20, 10]
    written(tmp_path, 30)
    assert steps_kept(storage) == [30, 10]
