"""The manifest of a checkpoint: the place of each box of each tensor in its files, with a sum for every MiB.

    step-00000120/
      rank-00000.safetensors    the boxes that rank 0 wrote, in the format that everybody reads
      rank-00000.json           a FileIndex: name, full shape and box of each, and the sums
      ...
      manifest.json             a Manifest, written last: where it is, all is there and durable

Nothing here is executed or trusted: names are of one form, numbers have limits, and every file is held against its sum
by whoever reads it. A digest is no signature: who makes a checkpoint up makes its digests right. So whatever is said
here may be a lie, and none costs more memory than the files have bytes. Torch is not needed to look at a checkpoint.
"""

import re
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from shardwright.config import largest
from shardwright.config.base import Spec, printable, shortened
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.units import MIB
from shardwright.sharding.row_boxes import num_elements_of
from shardwright.train.checkpoint.run_state import is_finite, state_fault

FORMAT = 1
BLOCK_BYTES = MIB  # of a file, that one sum is of
MANIFEST = "manifest.json"
LATEST = "latest"
STEP_FOLDER = re.compile(r"step-([0-9]{8,10})")
DATA_FILE = re.compile(r"rank-([0-9]{5,8})\.safetensors")
INDEX_FILE = re.compile(r"rank-([0-9]{5,8})\.json")
# Number types as safetensors files name them, with the bytes of an element.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

_MOST_DIMS, _MOST_NAME, _MOST_SENTENCE = 8, 300, 1000
MOST_PATH = 4096  # characters that are kept of a path
MOST_JSON_BYTES = 32 * MIB  # of one file: 200,000 boxes, or the sums of 2 TiB; read, it takes twenty times as much

# What a run goes on counting from: floating-point numbers, as optimizers count with, have it.
_MOST_COUNTED = 2**53
_Count = Annotated[int, Field(ge=0, lt=2**62)]


class BrokenCheckpointError(ValueError):
    """A checkpoint is not whole: the message says which file, and what is wrong with it."""


class StoredBox(Spec):
    """A box of a tensor in a file: from which byte on, and of what."""

    name: str = Field(max_length=_MOST_NAME, pattern=r"^[A-Za-z0-9_.-]+$")
    full_shape: tuple[_Count, ...] = Field(max_length=_MOST_DIMS)
    box: tuple[tuple[_Count, _Count], ...] = Field(max_length=_MOST_DIMS)
    dtype: str
    start_byte: _Count

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return num_elements_of(self.box) * DTYPE_BYTES[self.dtype]


class FileIndex(Spec):
    """The contents of one file. `sums` are the CRC-32 of each block of it, the last of which may be short."""

    file: str
    num_bytes: _Count
    sums: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    boxes: tuple[StoredBox, ...]

    def faults(self) -> list[str]:
        """Impossible values in the manifest."""
        found = [] if DATA_FILE.fullmatch(self.file) else [f"a file is called {self.file!r}"]
        if len(self.sums) != -(-self.num_bytes // BLOCK_BYTES):
            found.append(f"{self.file} has {len(self.sums)} sums for {self.num_bytes:,} bytes")
        for stored in self.boxes:
            if stored.dtype not in DTYPE_BYTES:
                found.append(f"{self.file}: {stored.name} is of number type {stored.dtype!r}")
            elif len(stored.box) != len(stored.full_shape) or not all(
                0 <= start < stop <= size for (start, stop), size in zip(stored.box, stored.full_shape, strict=True)
            ):
                found.append(f"{self.file}: {stored.name} {stored.full_shape} has no box {stored.box}")
            elif stored.start_byte + stored.num_bytes > self.num_bytes:
                found.append(f"{self.file}: {stored.name} ends behind the file")
        return found or self._shared_bytes()

    def _shared_bytes(self) -> list[str]:
        """Boxes that lie in the same bytes: a small file could hold any number of them."""
        in_order = sorted(self.boxes, key=lambda stored: stored.start_byte)
        return [
            f"{self.file}: {before.name} and {stored.name} share bytes"
            for before, stored in pairwise(in_order)
            if before.start_byte + before.num_bytes > stored.start_byte
        ]


class FileNote(Spec):
    """A file of a checkpoint as its manifest names it: the index, by the digest of what it says."""

    index: str
    digest: str = Field(min_length=32, max_length=32)
    num_bytes: _Count  # of the data file


class StateHealth(Spec):
    """Why a state is not healthy: a number that is none, or a loss above its band, in the step that led to it or in its
    weights. Without a cause it is healthy: one that goes on from it has what a good step left."""

    cause: Literal["", "not finite", "spike"] = ""
    sentence: str = Field("", max_length=_MOST_SENTENCE)

    @property
    def is_healthy(self) -> bool:
        """True if nothing is known against the state."""
        return not self.cause


HEALTHY = StateHealth()


class SourcePlace(Spec):
    """Where a run stands in a source: it has had so many samples of it, of which the `first` ones came before sources
    were mixed as they are now. The digest tells its tokens apart, wherever they lie; `path` is for people. One that is
    left out has weight 0."""

    path: str = Field(max_length=MOST_PATH)
    digest: str = Field(min_length=32, max_length=32)
    num_tokens: _Count
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    first: _Count
    had: _Count


class DataPlace(Spec):
    """The data that a place in them is of. The sources are mixed so from the run's sample number `begun` on, in an
    order that is one of the run's `seed`."""

    begun: _Count
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    sources: tuple[SourcePlace, ...] = Field(min_length=1, max_length=2 * largest.SOURCES)


class MeasuredLoss(Spec):
    """A loss in nats a token, and a digest of the set that it was measured on: only losses on the same compare."""

    loss: Annotated[float, Field(allow_inf_nan=False)]
    set_digest: str = Field(min_length=32, max_length=32)


class Manifest(Spec):
    """The description of a checkpoint. The run goes on behind the first `samples` of the data; of these it left
    `passed_over` out, for what became of it in them. `job` is the job with its plan as it ran, and `state` what is a
    few numbers and no tensor. Checkpoints of earlier versions do not say how healthy they are, and count as healthy,
    nor of which `data` their samples are; those of own modules have none. `losses` are those that were measured with
    this state, on sets by their names, where they are numbers."""

    format: int = FORMAT
    step: Annotated[int, Field(ge=0, le=largest.STEPS)]
    samples: _Count
    passed_over: _Count = 0
    optimizer_steps: _Count
    job: dict[str, Any]
    state: dict[str, Any]
    health: StateHealth = HEALTHY
    data: DataPlace | None = None
    losses: dict[str, MeasuredLoss] = Field({}, max_length=largest.SOURCES + 1)
    files: tuple[FileNote, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(note.num_bytes for note in self.files)


def folder_name(step: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def data_file(rank: int) -> str:
    """The file that a rank writes its boxes to."""
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """The file that a rank says in what it wrote."""
    return f"rank-{rank:05d}.json"


def digest_of(data: bytes) -> str:
    """32 characters that no other data have."""
    return blake2b(data, digest_size=16).hexdigest()


def to_bytes(spec: FileIndex | Manifest) -> bytes:
    """JSON, with a last line that is the digest of all before it."""
    body = spec.model_dump_json().encode() + b"\n"
    return body + digest_of(body).encode() + b"\n"


def read_index(data: bytes, name: str) -> FileIndex:
    """Raises BrokenCheckpointError."""
    index = _read(FileIndex, data, name)
    if faults := index.faults():
        raise BrokenCheckpointError(f"{name}: {faults[0]}")
    return index


def read_manifest(data: bytes, name: str) -> Manifest:
    """Raises BrokenCheckpointError."""
    manifest = _read(Manifest, data, name)
    if manifest.format != FORMAT:
        raise BrokenCheckpointError(f"{name} is of format {manifest.format}, and this version reads format {FORMAT}")
    if wrong := [note.index for note in manifest.files if not INDEX_FILE.fullmatch(note.index)]:
        raise BrokenCheckpointError(f"{name} names a file {shortened(wrong[0])!r}")
    if len({note.index for note in manifest.files}) < len(manifest.files):
        raise BrokenCheckpointError(f"{name} names a file twice")
    if fault := _count_fault(manifest):
        raise BrokenCheckpointError(f"{name} says {fault}")
    if not (is_finite(manifest.job) and is_finite(manifest.state)):
        raise BrokenCheckpointError(f"{name} has numbers that are none")
    if fault := _job_fault(manifest.job) or state_fault(manifest.state):
        raise BrokenCheckpointError(f"{name}: {fault}")
    return manifest


def _count_fault(manifest: Manifest) -> str:
    """Why what was counted can't be true; empty if it can."""
    counted = {
        "samples": manifest.samples,
        "passed_over": manifest.passed_over,
        "optimizer_steps": manifest.optimizer_steps,
    }
    data = manifest.data
    counted |= {f"first sample of source {n}": source.first for n, source in enumerate(data.sources if data else ())}
    if above := [f"{name} {count:,}" for name, count in counted.items() if count > _MOST_COUNTED]:
        return f"{' and '.join(above)}, which no run reaches"
    if data is None:
        return ""
    since = manifest.samples - data.begun
    if since < 0:
        return f"that its data begin with sample {data.begun:,}, behind those that were had, {manifest.samples:,}"
    for n, source in enumerate(data.sources):
        if not 0 <= source.had - source.first <= since:
            return (
                f"that {source.had:,} samples of source {n} were had, {source.first:,} of them before the last "
                f"{since:,} of all sources"
            )
    return ""


def _job_fault(job: dict[str, Any]) -> str:
    """Why a stored job is none; empty if it looks like one. Another version's may have other fields."""
    for section in ("model", "plan"):
        if section not in job:
            return f"its job has no {section}"
    wrong = [name for name, fields in job.items() if name != "name" and not isinstance(fields, dict)]
    return f"its job's {shortened(wrong[0])!r} is no section" if wrong else ""


def _read(kind: type, data: bytes, name: str) -> Any:
    body, newline, rest = data[:-1].rpartition(b"\n")
    if not newline or rest != digest_of(body + newline).encode() or data[-1:] != b"\n":
        raise BrokenCheckpointError(f"{name} is not as it was written: its digest is another")
    try:
        # By way of JSON, in which strict mode accepts a list for a tuple.
        return kind.model_validate_json(body, strict=True)  # type: ignore[attr-defined]
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": "too deep", "loc": ()}
        where = shortened(printable(".".join(map(str, first["loc"]))))
        raise BrokenCheckpointError(f"{name} can't be read: {where} {first['msg']}") from None


def optimizer_of(manifest: Manifest) -> OptimizerSpec:
    """The optimizer of a stored job, as far as this version knows its fields. Raises BrokenCheckpointError."""
    stored = manifest.job.get("optimizer", {})
    known = {name: value for name, value in stored.items() if name in OptimizerSpec.model_fields}
    try:
        return OptimizerSpec.model_validate(known)
    except ValidationError as error:
        raise BrokenCheckpointError(f"its job's optimizer can't be: {error.errors()[0]['msg']}") from None


def in_words(health: StateHealth) -> str:
    """Why a state is not healthy, fit for a terminal; "healthy" where it is."""
    if health.is_healthy:
        return "healthy"
    return shortened(" ".join(printable(health.sentence or health.cause).split()), _MOST_SENTENCE)


def describe_job(job: dict[str, Any]) -> str:
    """The plan of a stored job in a few words, as far as it says one."""
    plan = job["plan"]
    degrees = [f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if plan.get(axis, 1) != 1]
    words = [*degrees, f"zero {plan.get('zero', 0)}", str(plan.get("schedule", ""))]
    return ", ".join(shortened(printable(word)) for word in words)
