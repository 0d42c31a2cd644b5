"""Checkpoints that somebody made up, with right digests: no lie in them is loaded, crashes or costs memory."""

import json
import math
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fuzz.hostile_checkpoints import LAST, job_fields, whole_folders
from shardwright.cli.kept_checkpoints import checkpoint
from shardwright.config.load import make_job
from shardwright.sharding.parameter_shard import Box
from shardwright.train.build import job_mesh
from shardwright.train.checkpoint import boxes
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, load_boxes, save_boxes
from shardwright.train.checkpoint.checked_blocks import CheckedFile
from shardwright.train.checkpoint.kept import check_whole, steps_kept
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, FileIndex, StoredBox, digest_of, read_index
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.checkpoint.storage import LocalStorage, open_storage
from shardwright.train.checkpoint.whole_tensors import check_kinds, tile
from support.languages import differing, num_chinese

Fields = dict[str, Any]
FP8 = 1  # the variant of whole_folders with fp8 histories


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    sides = [st.sampled_from([(a, b) for a in range(size) for b in range(a + 1, size + 1)]) for size in shape]
    return st.tuples(*sides)


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        number, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        box = boxes[number]
        start, stop = box[dim]
        if stop - start > 1:
            cut = draw(st.integers(start + 1, stop - 1))
            boxes[number] = (*box[:dim], (start, cut), *box[dim + 1 :])
            boxes.append((*box[:dim], (cut, stop), *box[dim + 1 :]))
    return shape, boxes


@given(cuttings())
def test_what_is_cut_tiles_the_whole(cutting: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = cutting
    assert tile(boxes, shape)


@given(st.data())
def test_boxes_tile_where_every_element_is_in_one(data: st.DataObject) -> None:
    shape, boxes = data.draw(cuttings())
    others = [data.draw(boxes_of(shape)) if data.draw(st.booleans()) else box for box in boxes]
    count = dict.fromkeys(product(*map(range, shape)), 0)
    for box in others:
        for place in product(*(range(start, stop) for start, stop in box)):
            count[place] += 1
    assert tile(others, shape) == (set(count.values()) == {1})


def test_many_boxes_are_looked_at_once() -> None:
    """Comparing each with each would be 2 x 10^8 comparisons."""
    rows = [((i, i + 1), (0, 2**40)) for i in range(20_000)]
    assert tile(rows, (20_000, 2**40))
    assert not tile([*rows[:-1], rows[0]], (20_000, 2**40))


@pytest.mark.parametrize(("kind", "others"), [("weights", "F16"), ("exp_avg", "F16"), ("exp_avg_sq", "F16")])
def test_numbers_that_a_run_does_not_write(kind: str, others: str) -> None:
    """Moments may be in bf16, some or all, and weights that have no masters."""

    def files(**numbers: str) -> list[FileIndex]:
        dtypes = {"weights": "F32", "exp_avg": "F32", "exp_avg_sq": "BF16"} | numbers
        boxes = [
            StoredBox(name=f"{of}.norm", full_shape=(8,), box=((0, 8),), dtype=dtype, start_byte=0)
            for of, dtype in dtypes.items()
        ]
        return [FileIndex(file="rank-00000.safetensors", num_bytes=0, sums=(), boxes=tuple(boxes))]

    check_kinds(files(), 1)
    check_kinds(files(exp_avg="BF16"), 1)
    check_kinds(files(weights="BF16"), 1)
    with pytest.raises(
        BrokenCheckpointError, match=f"{kind}.norm is of number type {others}, and is written as F32 or BF16"
    ):
        check_kinds(files(**{kind: others}), 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with two whole checkpoints, of two files each."""
    return lay_out(tmp_path, 0)


def lay_out(root: Path, variant: int) -> Path:
    for name, contents in whole_folders()[variant].items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    return root


def signed(fields: Any) -> bytes:
    body = json.dumps(fields).encode() + b"\n"
    return body + digest_of(body).encode() + b"\n"


def parsed(path: Path) -> Any:
    return json.loads(path.read_bytes()[:-33])


def make_up(root: Path, change: Callable[[Fields, list[Fields]], object], step: int = LAST) -> None:
    """Change the manifest and the indices of a checkpoint, and make all digests right again."""
    here = root / f"run/checkpoints/step-{step:08d}"
    manifest = parsed(here / "manifest.json")
    names = [note["index"] for note in manifest["files"]]
    indices = [parsed(here / name) for name in names]
    change(manifest, indices)
    for name, index in zip(names, indices, strict=True):
        (here / name).write_bytes(signed(index))
        for note in manifest["files"]:
            if note["index"] == name:
                note |= {"digest": digest_of((here / name).read_bytes()), "num_bytes": index["num_bytes"]}
    (here / "manifest.json").write_bytes(signed(manifest))


def _duplicate(manifest: Fields, indices: list[Fields]) -> None:
    manifest["files"][1] = manifest["files"][0]


def _of_another_file(_: Fields, indices: list[Fields]) -> None:
    indices[1] = indices[0]


def _share_bytes(_: Fields, indices: list[Fields]) -> None:
    one, other = [box for box in indices[0]["boxes"] if box["box"] == [[0, 8]]][:2]
    one["start_byte"] = other["start_byte"]


def _twice(_: Fields, indices: list[Fields]) -> None:
    """One half of a tensor is there twice, and the other is not: the elements add up."""
    by_name = {box["name"]: box for box in indices[1]["boxes"]}
    box = next(box for box in indices[0]["boxes"] if box["name"] in by_name and box["box"] != box["full_shape"])
    box["box"] = by_name[box["name"]]["box"]


def _rename(old: str, new: str) -> Callable[[Fields, list[Fields]], None]:
    def change(_: Fields, indices: list[Fields]) -> None:
        for index in indices:
            for box in index["boxes"]:
                box["name"] = box["name"].replace(old, new, 1) if box["name"].startswith(old) else box["name"]

    return change


LIES: dict[str, tuple[Callable[[Fields, list[Fields]], object], str]] = {
    "a file twice": (_duplicate, "names a file twice"),
    "a file under another's name": (_of_another_file, "is of .* bytes of rank-00000.safetensors"),
    "two boxes in the same bytes": (_share_bytes, "share bytes"),
    "a half twice": (_twice, "not all there, each element once"),
    "one moment alone": (_rename("exp_avg_sq.", "other."), "has no exp_avg_sq"),
    "moments of nothing": (_rename("weights.norm", "other.norm"), "has exp_avg.norm.*, and no weights"),
    "moments before a step": (lambda m, _: m.update(optimizer_steps=0), "0 steps, and it has exp_avg"),
    "another number type": (
        lambda _, i: [box.update(dtype="I32") for one in i for box in one["boxes"]], "is of number type I32"
    ),
    "a name that a terminal obeys": (_rename("weights.norm", "\x1b[2J"), "can't be read: boxes"),
    "a job that is a list": (lambda m, _: m.update(job=[1]), "job Input should be"),
    "a job without a plan": (lambda m, _: m["job"].pop("plan"), "its job has no plan"),
    "a plan that is a number": (lambda m, _: m["job"].update(plan=4), "'plan' is no section"),
    "a section that is a text": (lambda m, _: m["job"].update(optimizer="x"), "'optimizer' is no section"),
    "a number that is none": (lambda m, _: m["job"]["model"].update(layers=math.nan), "numbers that are none"),
    "steps that no run reaches": (lambda m, _: m.update(optimizer_steps=2**62 - 1), "optimizer_steps 4,611.*which no"),
    "samples that no run reaches": (lambda m, _: m.update(passed_over=2**60), "says passed_over 1,152.*which no run"),
    "health that is none": (lambda m, _: m["state"].update(health={"judge": {}}), "health.judge.band Field required"),
    "a loss that is a text": (
        lambda m, _: m["state"]["health"]["judge"]["band"].update(past=["x"]), "band.past.0 Input should be"
    ),
    "a loss scale of 0": (
        lambda m, _: m["state"].update(
            loss_scale={"value": 0.0, "num_good_in_a_row": 0, "num_skipped_in_a_row": 0, "num_skipped": 0}
        ),
        "loss_scale.value Input should be greater",
    ),
    "a state that is a number": (lambda m, _: m.update(state={"health": 3}), "is no fields"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_told_and_the_checkpoint_before_taken(lie: str, folder: Path) -> None:
    change, fault = LIES[lie]
    make_up(folder, change)
    storage = open_storage(str(folder / "run/checkpoints"))
    with pytest.raises(BrokenCheckpointError, match=fault):
        check_whole(storage, LAST)
    check_whole(storage, LAST - 1)
    job = make_job(job_fields(0))
    begun = begin(job, job_mesh(job, 0, torch.device("cpu")), folder / "run")
    assert begun.step == LAST - 1
    assert any(f"step-{LAST:08d} is not whole" in line for line in begun.lines)


@pytest.mark.parametrize("shape", [[], [0], [1, 1], [2**17]])
def test_a_history_that_is_none_is_told(shape: list[int], tmp_path: Path) -> None:
    folder = lay_out(tmp_path, FP8)

    def change(_: Fields, indices: list[Fields]) -> None:
        for index in indices:
            index["boxes"] = [box for box in index["boxes"] if not box["name"].startswith("float8.")]
        box = {"name": "float8.x.x", "full_shape": shape, "box": [[0, size] for size in shape], "dtype": "F32"}
        indices[0]["boxes"].append(box | {"start_byte": indices[0]["num_bytes"] - 4})

    make_up(folder, change)
    with pytest.raises(BrokenCheckpointError, match=r"no history of amaxes|has no box|ends behind the file"):
        check_whole(open_storage(str(folder / "run/checkpoints")), LAST)


def test_memory_is_taken_for_what_is_there(tmp_path: Path) -> None:
    """An index of 16 TB with a sum for each MiB, and a file of a few bytes."""
    num_bytes = 2**44
    box = StoredBox(name="x", full_shape=(2**42,), box=((0, 2**42),), dtype="F32", start_byte=0)
    index = FileIndex(file="rank-00000.safetensors", num_bytes=num_bytes, sums=(0,) * (num_bytes >> 20), boxes=(box,))
    assert not index.faults()
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / index.file).write_bytes(b"few")
    wanted = WantedBox("x", box.full_shape, box.box, take=lambda _: None)
    with pytest.raises(BrokenCheckpointError, match="has 3 bytes, and was written with"):
        load_boxes([wanted], LocalStorage(tmp_path), "step", [index])


@pytest.mark.parametrize("slab_bytes", [8, 64, 200, 4096])
def test_a_part_is_read_a_slab_at_a_time(slab_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(3 * 5 * 7, dtype=torch.float32).view(3, 5, 7)
    held = HeldBox("x", (3, 5, 7), ((0, 3), (0, 5), (0, 7)), whole)
    index = read_index(save_boxes([held], LocalStorage(tmp_path), "step", 0), "index")
    most, read = [0], CheckedFile.read

    def spied(file: CheckedFile, start: int, stop: int) -> memoryview:
        most[0] = max(most[0], stop - start)
        return read(file, start, stop)

    monkeypatch.setattr(boxes, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(CheckedFile, "read", spied)
    for box in (((0, 3), (0, 5), (0, 7)), ((1, 3), (2, 4), (3, 6)), ((2, 3), (4, 5), (6, 7))):
        results: list[torch.Tensor] = []
        load_boxes([WantedBox("x", (3, 5, 7), box, take=results.append)], LocalStorage(tmp_path), "step", [index])
        assert torch.equal(results[0], whole[tuple(slice(start, stop) for start, stop in box)])
    assert 0 < most[0] <= slab_bytes


def test_values_and_sums_that_agree_are_another_checkpoint(folder: Path) -> None:
    data = folder / f"run/checkpoints/step-{LAST:08d}/rank-00001.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    make_up(folder, lambda _, indices: indices[1].update(sums=[zlib.crc32(raw)]))
    check_whole(open_storage(str(folder / "run/checkpoints")), LAST)


@pytest.mark.parametrize("name", ["step-000000002", "step-٠٠٠٠٠٠٠٢", "step-00000002x", "step-2"])
def test_a_folder_of_another_name_is_none(name: str, folder: Path) -> None:
    here = folder / "run/checkpoints"
    (here / f"step-{LAST:08d}").rename(here / name)
    assert steps_kept(open_storage(str(here))) == [1]


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_command_shows_a_terminal_nothing_that_it_obeys(command: str, folder: Path) -> None:
    make_up(folder, lambda m, _: m["job"]["plan"].update(schedule="\x1b[2J" + "x" * 1000, dp="\r\x07"))
    done = CliRunner().invoke(checkpoint, [command, str(folder / "run")])
    assert done.exit_code == 0 and "\\x1b[2J" in done.output
    assert all(c.isprintable() or c == "\n" for c in done.output) and len(done.output) < 8000


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_command_speaks_chinese_with_the_same_numbers(command: str, folder: Path) -> None:
    english, chinese = (
        CliRunner().invoke(checkpoint, [command, str(folder / "run"), "--lang", language]).stdout
        for language in ("en", "zh")
    )
    assert not num_chinese(english) and num_chinese(chinese) >= chinese.count("\n")
    assert not differing(english, chinese)


def test_ls_and_verify_tell_each_checkpoint(folder: Path) -> None:
    make_up(folder, lambda m, _: m.update(job={}), step=1)
    rows = {}
    for command in ("ls", "verify"):
        done = CliRunner().invoke(checkpoint, [command, str(folder / "run"), "--json"])
        rows[command] = json.loads(done.stdout)
        assert done.exit_code == (command == "verify")
    assert rows["ls"][0] == {"step": 1, "fault": "manifest.json: its job has no model"}
    assert rows["ls"][1]["files"] == 2 and rows["ls"][1]["plan"] == "zero 0, 1f1b"
    assert rows["verify"] == [row | {"whole": row["step"] == LAST} for row in rows["ls"]]
    text = CliRunner().invoke(checkpoint, ["verify", str(folder / "run")]).output.splitlines()
    assert text[0].endswith("its job has no model") and text[1].endswith("MiB  zero 0, 1f1b, whole")
