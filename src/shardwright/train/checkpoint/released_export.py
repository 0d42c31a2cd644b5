"""Export of a checkpoint's weights in the format of Hugging Face's libraries: names and layouts of a model family, its
config.json, and the tokenizer of the run and of the model that it started from; or of its adapters, as peft has them.

Each tensor is assembled from the boxes of the checkpoint, slab by slab, and written before the next one begins: so the
export needs memory for one tensor. A released tensor is one that the export writes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from shardwright.config.data import DataSpec
from shardwright.config.hugging_face.config_json import (
    ADAPTER,
    CONFIG,
    family_of,
    fields_of,
    is_decoder_alone,
    positions_key,
    read_keys,
)
from shardwright.config.hugging_face.same_arithmetic import differing_fields
from shardwright.config.hugging_face.written_config import config_bytes, written_config
from shardwright.config.model import ModelSpec
from shardwright.sharding.hugging_face.adapter_layout import adapter_keys, adapter_layout
from shardwright.sharding.hugging_face.layout import copies, correction_biases, layout_of
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.checkpoint.boxes import WantedBox, load_boxes
from shardwright.train.checkpoint.export import EXPORTED, TORCH, slabs_of, write_values
from shardwright.train.checkpoint.kept import indices_of
from shardwright.train.checkpoint.manifest import FileIndex, Manifest, folder_name
from shardwright.train.checkpoint.released_companions import companions, text_companions
from shardwright.train.checkpoint.released_weights import paste_part
from shardwright.train.checkpoint.safetensors_folder import Files, write_safetensors
from shardwright.train.checkpoint.safetensors_format import WrittenTensor
from shardwright.train.checkpoint.storage import Storage


@dataclass(frozen=True)
class _Part:
    """A piece of a released tensor, and the checkpoint's tensor with its values."""

    stored_name: str
    full_shape: tuple[int, ...]
    piece: ReleasedPiece


def export_released(
    storage: Storage, manifest: Manifest, target: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False
) -> Files:
    """Write the weights of a checkpoint to a folder that transformers opens, or its adapters to one that peft opens.
    Returns the tensors of each file.

    `dtype` is "keep", for the stored float32, or one of EXPORTED. Raises PlanError if no family fits the model, or if a
    file exists that may not be overwritten; BrokenCheckpointError, DiskFullError.
    """
    model = ModelSpec.model_validate_json(json.dumps(manifest.job["model"]))
    family, keys = _configuration(model)
    weight_dtype = "F32" if dtype == "keep" else EXPORTED[dtype]
    parts = _parts(family, model)
    tensors = [
        WrittenTensor(
            name,
            tensor_parts[0].piece.shape,
            weight_dtype if tensor_parts[0].stored_name.startswith("weights.") else "F32",
        )
        for name, tensor_parts in parts.items()
    ]
    indices = indices_of(storage, manifest)
    write = partial(_write, parts, storage, folder_name(manifest.step), indices)
    if model.is_adapted:
        other_files = {ADAPTER: config_bytes(adapter_keys(family, model))}
    else:
        config = config_bytes(keys | {"dtype": {"F32": "float32", "BF16": "bfloat16"}[weight_dtype]})
        data = DataSpec.model_validate_json(json.dumps(manifest.job.get("data", {})))
        own_files = companions(Path(model.weights)) if model.weights else {}
        other_files = {CONFIG: config} | own_files | text_companions(data)
    return write_safetensors(
        target, tensors, write, file_bytes=file_bytes, overwrite=overwrite, other_files=other_files
    )


def has_family(manifest: Manifest) -> bool:
    """True if a family of Hugging Face's library fits the model of a checkpoint, and peft its adapters."""
    try:
        model = ModelSpec.model_validate_json(json.dumps(manifest.job.get("model")))
        family, _ = _configuration(model)
        if model.is_adapted:
            adapter_keys(family, model)
    except ValueError:  # also a PlanError
        return False
    return True


def _configuration(model: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The family and the keys of config.json: of the model that the run started from, if that is a decoder alone and
    its arithmetic is the same, else of the family that fits."""
    source = Path(model.weights, CONFIG)
    if model.weights and source.is_file():
        keys = read_keys(source)
        fields, faults = fields_of(keys)
        if is_decoder_alone(keys) and not faults and not differing_fields(fields, model):
            name = positions_key(keys)  # a run has as many learned positions as its samples are long
            return family_of(keys), keys | ({name: model.sequence} if name else {})
    return written_config(model)


def _parts(family: str, model: ModelSpec) -> dict[str, list[_Part]]:
    """The parts of each released tensor, by its name, in the order of the model's parameters."""
    parts: dict[str, list[_Part]] = {}
    shapes = {place.name: place.full_shape for place in model_parameters(model)}
    for name, pieces in (adapter_layout if model.is_adapted else layout_of)(family, model).items():
        for piece in pieces:
            parts.setdefault(piece.name, []).append(_Part(f"weights.{name}", shapes[name], piece))
    for block, piece in correction_biases(family, model).items():
        parts[piece.name] = [_Part(f"router.{block}.bias_E", piece.view, piece)]
    for copy_name, source_name in copies(family, model).items():
        parts[copy_name] = parts[source_name]
    return parts


def _write(
    parts: dict[str, list[_Part]],
    storage: Storage,
    folder: str,
    indices: list[FileIndex],
    file: IO[bytes],
    tensors: Sequence[WrittenTensor],
) -> None:
    """Write the values of tensors, each after it is assembled. Raises BrokenCheckpointError, OSError."""
    assembled: list[Tensor] = []  # the current tensor

    def take(tensor: WrittenTensor, part: _Part, box: Box, is_first: bool, is_last: bool, values: Tensor) -> None:
        if is_first:
            assembled.append(torch.empty(tensor.shape, dtype=TORCH[tensor.dtype]))
        paste_part(part.piece, values.view([stop - start for start, stop in box]), box, assembled[-1])
        if is_last:
            write_values(file, assembled.pop())

    wanted = []
    for tensor in tensors:
        slabs = [(part, box) for part in parts[tensor.name] for box in slabs_of(part.piece.region)]
        for index, (part, box) in enumerate(slabs):
            take_slab = partial(take, tensor, part, box, index == 0, index == len(slabs) - 1)
            wanted.append(WantedBox(part.stored_name, part.full_shape, box, take_slab))
    load_boxes(wanted, storage, folder, indices)
