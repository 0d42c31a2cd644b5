"""An export is the model: every weight, whole, under its name, from whatever plan; or nothing is there."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file

from shardwright.cli.main import cli
from shardwright.config.base import PlanError, RunError
from shardwright.config.job import JobSpec
from shardwright.config.units import MIB
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.parameter_shard import Box
from shardwright.train.build import build
from shardwright.train.checkpoint.boxes import HeldBox, save_boxes
from shardwright.train.checkpoint.export import export_weights, exported_tensors
from shardwright.train.checkpoint.kept import make_whole, manifest_of
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    FileIndex,
    Manifest,
    StoredBox,
    folder_name,
)
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import my_tokens, small_job
from support.ranks import run_on_mesh, run_ranks

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2 x pp 2": ("llama", {"tp": 2, "pp": 2}),
    "zero 3": ("gpt", {"dp": 2, "zero": 3}),
    "experts": ("deepseek", {"dp": 2, "ep": 2}),
    "tied over pp 2": ("llama-tied", {"pp": 2}),
}


def saved(mesh: Mesh, job: JobSpec, folder: Path) -> list[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
    """Train a step and save it. Returns what this rank holds of each weight, and of each router's bias."""
    replica = build(job, mesh)
    train_step(replica, 0, my_tokens(mesh, job, 0))
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(1, job.batch.global_batch_size, 0, {})
    writer.wait()
    held = []
    with replica.gathered():
        for stage in replica.stages.values():
            for parameter in placed_parameters(stage).values():
                place = parameter.place
                held.append((place.name, place.full_shape, place.box, parameter.detach().clone()))
            for layer, state in stage.routers().items():
                bias_E = state.state_dict()["bias_E"]
                held.append((f"router.{layer}.bias_E", tuple(bias_E.shape), ((0, len(bias_E)),), bias_E.clone()))
    return held


def whole(ranks: list[list[tuple[str, tuple[int, ...], Box, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The full tensors of all ranks together."""
    result: dict[str, torch.Tensor] = {}
    for name, shape, box, values in [held for rank in ranks for held in rank]:
        into = result.setdefault(name, torch.full(shape, torch.nan))
        into[tuple(slice(*ends) for ends in box)] = values
    return result


def export(*words: str) -> Result:
    """The command, whose errors come through."""
    return CliRunner().invoke(cli, ["checkpoint", "export", "--names", "own", *words], catch_exceptions=False)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_weights_of_any_plan_are_whole(name: str, tmp_path: Path) -> None:
    kind, plan = PLANS[name]
    job = small_job(kind, **plan)
    weights = whole(run_on_mesh(job, saved, job, tmp_path))
    if job.model.tied_embeddings:
        weights.pop("head.weight", None)
    file = tmp_path / "out" / "all.safetensors"
    answer = export(str(tmp_path), "--to", str(file)).output
    assert answer.startswith(f"step 1: {len(weights)} tensors, ") and answer.endswith(f" in 1 file, in {file}\n")
    assert equal(load_file(file), weights)
    export(str(tmp_path), "--to", str(tmp_path / "half"), "--dtype", "bf16")
    rounded = {name: w if name.startswith("router.") else w.bfloat16() for name, w in weights.items()}
    assert equal(load_file(tmp_path / "half" / "model.safetensors"), rounded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "half", "out"]


ROWS, COLUMNS = 1536, 1024


def large(folder: Path, num_rows: int = ROWS) -> Path:
    """A checkpoint of two files, which cut a matrix by columns, of 4 KiB a row; and a vector of number 7."""
    storage, generator = open_storage(str(folder / "checkpoints")), torch.Generator().manual_seed(1)
    for rank in range(2):
        ends, shape = (rank * COLUMNS // 2, (rank + 1) * COLUMNS // 2), (num_rows, COLUMNS)
        boxes = [
            HeldBox(
                f"weights.layers.{layer}.mlp.weight",
                shape,
                ((0, num_rows), ends),
                torch.randn(num_rows, COLUMNS // 2, generator=generator),
            )
            for layer in (10, 2)
        ]
        if rank:
            boxes.append(HeldBox("weights.norm.weight", (8,), ((0, 8),), torch.full((8,), 7.0)))
        save_boxes(boxes, storage, folder_name(3), rank)
    job = small_job().model_dump(mode="json")
    manifest = Manifest(step=3, samples=0, optimizer_steps=0, job=job, state={}, files=())
    make_whole(storage, manifest, 2)
    return folder


def test_a_folder_of_files_with_an_index(tmp_path: Path) -> None:
    """The names and the index are those that Hugging Face's libraries read."""
    run, to = large(tmp_path / "run"), tmp_path / "model"
    answer = json.loads(export(str(run), "--to", str(to), "--file-gib", "0.006", "--json").stdout)
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(path.name for path in to.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((to / "model.safetensors.index.json").read_text())
    layers = [f"layers.{layer}.mlp.weight" for layer in (2, 10)]
    assert index["weight_map"] == {layers[0]: names[0], layers[1]: names[1], "norm.weight": names[1]}
    assert index["metadata"]["total_size"] == answer["bytes"] == 2 * ROWS * COLUMNS * 4 + 32
    assert answer["files"] == {names[0]: layers[:1], names[1]: [layers[1], "norm.weight"]}
    with safe_open(to / names[1], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("norm.weight").tolist() == [7.0] * 8


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    run, to, file = large(tmp_path / "run", 8), tmp_path / "model", tmp_path / "model.safetensors"
    for place in (to, file):
        export(str(run), "--to", str(place))
        with pytest.raises(PlanError, match="is there already; name another place, or say --overwrite"):
            export(str(run), "--to", str(place))
        export(str(run), "--to", str(place), "--overwrite", "--dtype", "bf16")
        written = place / "model.safetensors" if place is to else place
        assert load_file(written)["norm.weight"].dtype == torch.bfloat16
    (to / "mine.txt").write_text("x")
    with pytest.raises(PlanError, match=r"has mine\.txt in it, which no export wrote"):
        export(str(run), "--to", str(to), "--overwrite")
    with pytest.raises(PlanError, match="s3:/x is an address"):
        export(str(run), "--to", "s3://x")
    with pytest.raises(RunError, match=r"/proc/new can't be written: .*; name another place"):
        export(str(run), "--to", "/proc/new")
    with pytest.raises(PlanError, match=r"there is none of step 4; there are those of steps 3"):
        export(str(run), "--to", str(tmp_path / "new"), "--step", "4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.safetensors", "run"]


@pytest.mark.parametrize("harm", ["flip", "truncate", "index"])
def test_of_a_damaged_checkpoint_nothing_is_written(harm: str, tmp_path: Path) -> None:
    run = large(tmp_path / "run")
    data = run / "checkpoints" / folder_name(3) / ("rank-00001.json" if harm == "index" else "rank-00001.safetensors")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw[:-1] if harm == "truncate" else raw)
    for name in ("model", "model.safetensors"):
        with pytest.raises(RunError, match=rf"checkpoint of {run}: .*rank-00001\..* verify {run}` tells"):
            export(str(run), "--to", str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "names", [["weights.__metadata__"], ["router.1.bias_E", "weights.router.1.bias_E"], ["exp_avg.x"]]
)
def test_names_that_make_no_file_are_refused(names: list[str]) -> None:
    boxes = [
        StoredBox(name=name, full_shape=(2,), box=((0, 2),), dtype="F32", start_byte=8 * i)
        for i, name in enumerate(names)
    ]
    index = FileIndex(file="rank-00000.safetensors", num_bytes=16, sums=(0,), boxes=tuple(boxes))
    with pytest.raises(BrokenCheckpointError):
        exported_tensors([index], "keep")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    run = large(tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(RunError, match=r"model can't be written: File too large .* or name another place"):
            export(str(run), "--to", str(tmp_path / "model"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.processes
def test_memory_is_that_of_slabs(tmp_path: Path) -> None:
    """Of two tensors of 96 MiB: two slabs of 16 MiB, parts of two files that they are read from, and one in bf16."""
    run = large(tmp_path / "run", 24 * 1024)
    grown = run_ranks(1, grown_bytes, run, tmp_path / "model")[0]
    assert 0 < grown < 130 * MIB


def grown_bytes(rank: int, store: str, run: Path, to: Path) -> int:
    """By how much the largest memory of this process grows."""
    storage = open_storage(str(run / "checkpoints"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export_weights(storage, manifest_of(storage, 3), to, dtype="bf16", file_bytes=2**32)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
