"""Weights of strangers that say more than they have: refused with what is wrong, whatever they would become."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.train.checkpoint.pickled_weights import PickledFiles
from shardwright.train.checkpoint.released_companions import companions, text_companions
from shardwright.train.checkpoint.released_files import ReleasedFiles
from shardwright.train.checkpoint.safetensors_folder import _in_files
from shardwright.train.checkpoint.safetensors_format import WrittenTensor


def safetensors(folder: Path, header: dict[str, Any], num_bytes: int = 4096) -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return folder


def entry(start: int, stop: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("shape", [["9" * 4300] * 700, ["2"] * 65, [str(2**62)], ["0", str(2**70)]])
def test_shapes_have_a_bound(shape: list[str], tmp_path: Path) -> None:
    """A product of 700 numbers of 4,300 digits takes half a minute, and a header has room for thousands of those."""
    folder = safetensors(tmp_path / "m", {"x": entry(0, 4, [7])})
    text = json.dumps({"x": entry(0, 4, [7])}).replace("[7]", f"[{', '.join(shape)}]").encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(PlanError, match="its header can't be read; fetch it again"):
        ReleasedFiles(folder)


@pytest.mark.parametrize("second", [(0, 4096), (4092, 4096), (8, 12)])
def test_tensors_share_no_bytes(second: tuple[int, int], tmp_path: Path) -> None:
    folder = safetensors(tmp_path / "m", {"a": entry(0, 4096), "b": entry(*second)})
    with pytest.raises(PlanError, match=r"(a and b|b and a) share bytes; fetch it again"):
        ReleasedFiles(folder)


def test_tensors_beside_each_other_and_empty_ones_share_none(tmp_path: Path) -> None:
    held = {"b": entry(2048, 4096), "none": entry(2048, 2048, [0]), "a": entry(0, 2048), "end": entry(4096, 4096, [0])}
    assert {*ReleasedFiles(safetensors(tmp_path / "m", held)).tensors} == {*held}


def pickled(folder: Path, held: Any) -> Path:
    folder.mkdir()
    torch.save(held, folder / "pytorch_model.bin")
    return folder


BASE = torch.arange(1000.0)
ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "expanded": (lambda: torch.zeros(1).expand(2**28), r"of \[268435456\] has 1,073,741,824 bytes, and 4 are in the"),
    "in steps": (
        lambda: torch.as_strided(torch.zeros(5), (3, 3), (1, 1)),
        r"of \[3, 3\] has 36 bytes, and 20 are in the file",
    ),
    "meta": (lambda: torch.zeros(2**40, device="meta"), "is a meta tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a sparse tensor"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), "is a sparse tensor"),
    "negated": (lambda: torch._neg_view(torch.ones(3)), "is told to be negated"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), r"is of torch\.complex64"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"is of torch\.qint8"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_pickled_tensors_are_plain_ones(name: str, tmp_path: Path) -> None:
    make, answer = ODD[name]
    with pytest.raises(PlanError, match=rf"pytorch_model\.bin(: x {answer}.*|.* can't be read as weights alone)"):
        PickledFiles(pickled(tmp_path / "m", {"y": torch.ones(2), "x": make()}))


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(PlanError, match=r"is a nested tensor|can't be read as weights alone"):
        PickledFiles(pickled(tmp_path / "m", {"x": nested}))


def test_views_of_one_storage_are_bounded_and_tied_weights_taken(tmp_path: Path) -> None:
    tied = {"shared": BASE, "encoder": BASE, "decoder": BASE, "head": BASE.view(10, 100), "part": BASE[:10]}
    assert len(PickledFiles(pickled(tmp_path / "tied", tied | {"other": torch.ones(100)})).tensors) == 6
    with pytest.raises(PlanError, match=r"its tensors have 800,000 bytes, and share 4,000 of them"):
        PickledFiles(pickled(tmp_path / "views", {f"x{n}": BASE for n in range(200)}))


def test_an_archive_with_packed_parts_is_refused(tmp_path: Path) -> None:
    """Its pickle of 40 MB has 40 KB there."""
    folder = pickled(tmp_path / "m", {"x": torch.ones(2)})
    with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in parts.items():
            large = pickle.dumps("x" * 40_000_000, 2) if name.endswith("data.pkl") else contents
            archive.writestr(name, large)
    assert (folder / "pytorch_model.bin").stat().st_size < 100_000
    with pytest.raises(PlanError, match="is an archive with packed parts, as torch writes none"):
        PickledFiles(folder)


class Counted(WrittenTensor):
    """A tensor whose bytes are asked for so often."""

    asked = 0

    @property
    def num_bytes(self) -> int:
        Counted.asked += 1
        return super().num_bytes


def test_many_tensors_are_put_into_files_one_by_one() -> None:
    """A header has room for hundreds of thousands: each is looked at once, not all before it again."""
    tensors = [Counted(f"x{n}", (n % 3,), "F32") for n in range(1000)]
    files = list(_in_files(tensors, 40).values())
    assert Counted.asked <= 3 * len(tensors)
    assert [tensor for held in files for tensor in held] == tensors
    for held, after in pairwise(files):
        num_bytes = sum(tensor.num_bytes for tensor in held)
        assert num_bytes <= 40 < num_bytes + after[0].num_bytes


def test_companions_are_not_read_through_links_out_of_the_folder(tmp_path: Path) -> None:
    """A clone may have such links, and what is converted is published."""
    model, key = tmp_path / "model", tmp_path / "id_ed25519"
    model.mkdir()
    key.write_text("SECRET")
    (model / "real.jinja").write_text("a template")
    (model / "tokenizer.json").write_text("{}")
    (model / "merges.txt").symlink_to("real.jinja")
    assert companions(model) == {"tokenizer.json": b"{}", "merges.txt": b"a template"}
    for target in (key, Path("../id_ed25519"), Path("/proc/self/environ")):
        (model / "chat_template.jinja").symlink_to(target)
        with pytest.raises(PlanError, match=r"chat_template\.jinja is a link out of the folder, to ") as refused:
            companions(model)
        assert "SECRET" not in str(refused.value)
        (model / "chat_template.jinja").unlink()
    (model / "config.json").symlink_to(key)  # its keys are written to the new one
    with pytest.raises(PlanError, match=r"config\.json is a link out of the folder, to "):
        companions(model)


def test_the_template_that_comes_with_shardwright_goes_along() -> None:
    (name, text), *others = text_companions(DataSpec(chats=True, chat_template="chatml")).items()
    assert (name, others) == ("chat_template.jinja", [])
    assert b"<|im_start|>assistant" in text


def test_the_tokenizer_and_the_template_of_a_runs_data_go_along(tmp_path: Path) -> None:
    folder, template = tmp_path / "words", tmp_path / "chatml.jinja"
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text(name)
    template.write_text("a template")
    files = {name: name.encode() for name in ("tokenizer.json", "tokenizer_config.json")}
    chats = {"chat_template.jinja": b"a template"}
    assert text_companions(DataSpec(tokenizer=str(folder), chat_template=str(template))) == files | chats
    assert text_companions(DataSpec(tokenizer=str(template))) == {"tokenizer.json": b"a template"}
    assert text_companions(DataSpec(chat_template=str(template))) == chats
    assert text_companions(DataSpec(tokenizer=str(tmp_path / "gone"), chat_template="gone.jinja")) == {}


@pytest.mark.parametrize("is_cache_elsewhere", [False, True])
def test_the_links_of_the_hubs_cache_are_read(is_cache_elsewhere: bool, tmp_path: Path) -> None:
    """snapshots/REVISION/NAME leads to blobs/HASH; in a folder of one's own that led there, too, once."""
    blobs = tmp_path / "models--us--it" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "ab12").write_text("{}")
    folder = tmp_path / "mine" if is_cache_elsewhere else tmp_path / "models--us--it" / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "vocab.json").symlink_to(blobs / "ab12" if is_cache_elsewhere else Path("../../blobs/ab12"))
    assert companions(folder) == {"vocab.json": b"{}"}
    other = tmp_path / "hub" / "snapshots" / "main"
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    other.mkdir(parents=True)
    os.rename(blobs / "ab12", tmp_path / "hub" / "blobs" / "ab12")
    (other / "vocab.json").symlink_to("../../blobs/ab12")
    assert companions(other) == {"vocab.json": b"{}"}
