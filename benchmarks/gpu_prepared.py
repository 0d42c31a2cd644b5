"""Results that gpu.py takes from a CPU, made before there is a device: references of parts equal and ranks, and the
dry runs of part memory.

gpu_bundle.py writes them into a folder beside these scripts. A missing one is made where it is needed.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from gpu_bench import Row, write_json

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record

_DRY_RUNS = "dry_runs.json"
_OF_FILE = 100_000  # bytes of a reference beside its tensors, at most


def key_of(job: JobSpec, tokens: bytes = b"") -> str:
    """A name for what a job gives on these tokens: on other ones, as another torch may draw, it would be something
    else."""
    return hashlib.sha256(job.model_dump_json().encode() + tokens).hexdigest()[:24]


@dataclass(frozen=True)
class Prepared:
    """A folder of references, one file each, and of dry runs, all in one."""

    folder: Path

    def record(self, key: str, make: Callable[[], Record]) -> Record:
        """A reference, made if it is not there."""
        file = self._file(key)
        if not file.exists():
            return make()
        result: Record = torch.load(file, weights_only=False)  # of whoever made these scripts
        return result

    def keep_record(self, key: str, make: Callable[[], Record], most_bytes: int) -> int:
        """Write a reference if it has room. Returns the bytes that it takes."""
        record = make()
        if sum(box.nbytes for _, box in record.boxes) > most_bytes - _OF_FILE:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(record, self._file(key))
        return self._file(key).stat().st_size

    def dry_run(self, key: str, make: Callable[[], Row]) -> Row:
        """The row of a dry run, made if it is not there."""
        result = self._dry_runs.get(key)
        return make() if result is None else result

    def keep_dry_runs(self, rows: dict[str, Row]) -> None:
        """Write dry runs by their keys."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _DRY_RUNS, rows)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.pt"

    @cached_property
    def _dry_runs(self) -> dict[str, Row]:
        file = self.folder / _DRY_RUNS
        result: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return result


HERE = Prepared(Path(__file__).parent / "prepared")
