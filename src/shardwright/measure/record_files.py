"""The files of ranks' results, for the process that compares them: tensors as safetensors, numbers as JSON. Reading
them can't run code.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.measure.verdict import Record
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, load_boxes, save_boxes
from shardwright.train.checkpoint.manifest import index_file, read_index
from shardwright.train.checkpoint.storage import LocalStorage
from shardwright.train.train_step import StepResult

_FOLDER = "record"
# The fields that decide if two results are equal (train/train_step.py).
_COMPARED = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped")


def write_record(record: Record, folder: Path, rank: int) -> None:
    """Write a rank's record. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    filled = [(number, values.cpu().contiguous()) for number, (_, values) in enumerate(record.boxes) if values.numel()]
    boxes = [
        HeldBox(str(number), tuple(values.shape), _whole(tuple(values.shape)), values) for number, values in filled
    ]
    save_boxes(boxes, LocalStorage(folder), _FOLDER, rank)
    numbers = {
        "steps": [{name: getattr(step, name) for name in _COMPARED} for step in record.steps],
        "places": [asdict(place) for place, _ in record.boxes],
        "evaluated": record.evaluated,
    }
    _numbers(folder, rank).write_text(json.dumps(numbers), encoding="utf-8")


def read_record(folder: Path, rank: int) -> Record:
    """Read the record of a rank, without empty boxes and without the use of experts."""
    storage = LocalStorage(folder)
    numbers: dict[str, Any] = json.loads(_numbers(folder, rank).read_bytes())
    places = [_place(fields) for fields in numbers["places"]]
    boxes: list[tuple[ParameterShard, Tensor]] = []

    def wanted(number: int, place: ParameterShard) -> WantedBox:
        return WantedBox(
            str(number), place.shape, _whole(place.shape), take=lambda values: boxes.append((place, values.clone()))
        )

    file = f"{_FOLDER}/{index_file(rank)}"
    index = read_index((folder / file).read_bytes(), file)
    wanted_boxes = [wanted(number, place) for number, place in enumerate(places) if place.num_elements]
    load_boxes(wanted_boxes, storage, _FOLDER, [index])
    return Record([StepResult(**step) for step in numbers["steps"]], boxes, numbers["evaluated"])


def _numbers(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.numbers.json"


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _place(fields: dict[str, Any]) -> ParameterShard:
    """A place from its JSON fields, in which tuples are lists."""
    box = tuple((start, stop) for start, stop in fields.pop("box"))
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ParameterShard(**fields | tuples, box=box)
