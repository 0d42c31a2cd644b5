"""The weights of a checkpoint as Hugging Face's libraries read them: names and layouts of a family, its config.json,
and the tokenizer of the model that the run began with.

Each tensor is put together from the boxes of the checkpoint, a slab at a time, and written before the next: memory is
that of one tensor.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwright.config.hugging_face.config_json import CONFIG, family_of, fields_of, read_keys
from shardwright.config.hugging_face.same_arithmetic import differing_fields
from shardwright.config.hugging_face.written_config import config_bytes, written_config
from shardwright.config.model import ModelSpec
from shardwright.sharding.hugging_face.layout import choice_biases, copies, layout_of
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.checkpoint.box_reader import load_boxes
from shardwright.train.checkpoint.boxes import WantedBox
from shardwright.train.checkpoint.export import EXPORTED, TORCH, slabs_of, write_values
from shardwright.train.checkpoint.kept import indices_of
from shardwright.train.checkpoint.manifest import FileIndex, Manifest, folder_name
from shardwright.train.checkpoint.released_companions import companions
from shardwright.train.checkpoint.released_weights import paste_part
from shardwright.train.checkpoint.safetensors_folder import Files, WrittenTensor, write_safetensors
from shardwright.train.checkpoint.storage import Storage

# Keys that say how many learned positions there are: a run has those of its samples.
_TABLE_ROWS = {"gpt2": "n_positions", "opt": "max_position_embeddings"}


@dataclass(frozen=True)
class _Part:
    """A piece of a tensor of theirs, and which of the checkpoint's tensors it is in."""

    stored: str
    full_shape: tuple[int, ...]
    piece: ReleasedPiece


def export_released(
    storage: Storage, manifest: Manifest, to: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False
) -> Files:
    """Write the weights of a checkpoint to a folder that transformers opens. Returns what each file holds.

    `dtype` is "keep", float32 as they are kept, or one of EXPORTED. Raises PlanError where no family has the model, or
    something is there that may not be overwritten; BrokenCheckpointError, DiskFullError.
    """
    model = ModelSpec.model_validate_json(json.dumps(manifest.job["model"]))
    family, keys = _configuration(model)
    number = EXPORTED.get(dtype, "F32")
    parts = _parts(family, model)
    tensors = [
        WrittenTensor(name, of[0].piece.shape, number if of[0].stored.startswith("weights.") else "F32")
        for name, of in parts.items()
    ]
    indices = indices_of(storage, manifest)
    write = partial(_write, parts, storage, folder_name(manifest.step), indices)
    along = companions(Path(model.weights)) if model.weights else {}
    beside = {CONFIG: config_bytes(keys | {"dtype": {"F32": "float32", "BF16": "bfloat16"}[number]})} | along
    return write_safetensors(to, tensors, write, file_bytes=file_bytes, overwrite=overwrite, beside=beside)


def has_family(manifest: Manifest) -> bool:
    """True if some family has the model of a checkpoint."""
    try:
        _configuration(ModelSpec.model_validate_json(json.dumps(manifest.job.get("model"))))
    except ValueError:  # PlanError is one
        return False
    return True


def _configuration(model: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The family and the keys of config.json: those of the model that the run began with, where it is the same."""
    source = Path(model.weights, CONFIG)
    if model.weights and source.is_file():
        keys = read_keys(source)
        fields, faults = fields_of(keys)
        if not faults and not differing_fields(fields, model):
            family = family_of(keys)
            return family, keys | ({_TABLE_ROWS[family]: model.sequence} if family in _TABLE_ROWS else {})
    return written_config(model)


def _parts(family: str, model: ModelSpec) -> dict[str, list[_Part]]:
    """The pieces of each tensor of theirs, by its name, in the order of our parameters."""
    found: dict[str, list[_Part]] = {}
    shapes = {place.name: place.full_shape for place in model_parameters(model)}
    for name, pieces in layout_of(family, model).items():
        for piece in pieces:
            found.setdefault(piece.name, []).append(_Part(f"weights.{name}", shapes[name], piece))
    for block, piece in choice_biases(family, model).items():
        found[piece.name] = [_Part(f"router.{block}.bias_E", piece.shape, piece)]
    for copy, of in copies(family, model).items():
        found[copy] = found[of]
    return found


def _write(
    parts: dict[str, list[_Part]], storage: Storage, folder: str, indices: list[FileIndex],
    file: IO[bytes], tensors: Sequence[WrittenTensor],
) -> None:  # fmt: skip
    """Values of tensors, each put together before it is written. Raises BrokenCheckpointError, OSError."""
    memory: list[Tensor] = []

    def take(tensor: WrittenTensor, part: _Part, box: Box, is_first: bool, is_last: bool, values: Tensor) -> None:
        if is_first:
            memory.append(torch.empty(tensor.shape, dtype=TORCH[tensor.dtype]))
        paste_part(part.piece, values.view([stop - start for start, stop in box]), box, memory[-1])
        if is_last:
            write_values(file, memory.pop())

    wanted = []
    for tensor in tensors:
        slabs = [(part, box) for part in parts[tensor.name] for box in slabs_of(part.piece.region)]
        for index, (part, box) in enumerate(slabs):
            takes = partial(take, tensor, part, box, index == 0, index == len(slabs) - 1)
            wanted.append(WantedBox(part.stored, part.full_shape, box, takes))
    load_boxes(wanted, storage, folder, indices)
