"""The files in which ranks leave what they did, for the process that compares them: tensors as safetensors, numbers as
JSON. Nothing that is read can run anything.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.measure.verdict import Record
from shardwright.sharding.parameter_shard import Box, ParameterShard
from shardwright.train.checkpoint.box_reader import load_boxes
from shardwright.train.checkpoint.box_writer import save_boxes
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox
from shardwright.train.checkpoint.manifest import index_file, read_index
from shardwright.train.checkpoint.storage import LocalStorage
from shardwright.train.train_step import StepResult

_FOLDER = "record"
# Two results are equal or not by these (train/train_step.py).
_COMPARED = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped")


def write_record(record: Record, folder: Path, rank: int) -> None:
    """Leave a rank's record. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    held = [(number, values.cpu().contiguous()) for number, (_, values) in enumerate(record.boxes) if values.numel()]
    boxes = [HeldBox(str(number), tuple(values.shape), _whole(tuple(values.shape)), values) for number, values in held]
    save_boxes(boxes, LocalStorage(folder), _FOLDER, rank)
    told = {
        "steps": [{name: getattr(step, name) for name in _COMPARED} for step in record.steps],
        "places": [asdict(place) for place, _ in record.boxes],
        "evaluated": record.evaluated,
    }
    _numbers(folder, rank).write_text(json.dumps(told), encoding="utf-8")


def read_record(folder: Path, rank: int) -> Record:
    """Read the record of a rank, without empty boxes and without the use of experts."""
    storage = LocalStorage(folder)
    told: dict[str, Any] = json.loads(_numbers(folder, rank).read_bytes())
    places = [_place(fields) for fields in told["places"]]
    boxes: list[tuple[ParameterShard, Tensor]] = []

    def wanted(number: int, place: ParameterShard) -> WantedBox:
        return WantedBox(
            str(number), place.shape, _whole(place.shape), take=lambda values: boxes.append((place, values.clone()))
        )

    file = f"{_FOLDER}/{index_file(rank)}"
    index = read_index((folder / file).read_bytes(), file)
    here = [wanted(number, place) for number, place in enumerate(places) if place.num_elements]
    load_boxes(here, storage, _FOLDER, [index])
    return Record([StepResult(**step) for step in told["steps"]], boxes, told["evaluated"])


def _numbers(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.numbers.json"


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _place(fields: dict[str, Any]) -> ParameterShard:
    """JSON has lists for tuples."""
    box = tuple((start, stop) for start, stop in fields.pop("box"))
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ParameterShard(**fields | tuples, box=box)
