"""The manifest and the file indices of a checkpoint: where each box of each tensor lies, and a checksum of every MiB.

    step-00000120/
      rank-00000.safetensors    the boxes that rank 0 wrote, in the safetensors format
      rank-00000.json           a FileIndex: name, full shape and box of each tensor part, and the checksums
      ...
      manifest.json             a Manifest, written last: if it exists, all other files are complete and durable

Nothing in a checkpoint is executed or trusted: names have a fixed form, numbers have limits, and a reader compares
every file with its checksums. A digest is not a signature: a forged checkpoint has correct digests. So any field may be
false, but no false field makes a reader allocate more memory than the files have bytes. Torch is not needed to inspect
a checkpoint.
"""

import re
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from shardwright.config import largest
from shardwright.config.base import Spec, printable, shortened
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import MIB
from shardwright.sharding.row_boxes import num_elements_of
from shardwright.train.checkpoint.run_state import is_finite, state_fault
from shardwright.train.checkpoint.safetensors_format import DTYPE_BYTES

FORMAT = 1
BLOCK_BYTES = MIB  # bytes of a file that one checksum covers
MANIFEST = "manifest.json"
LATEST = "latest"
STEP_FOLDER = re.compile(r"step-([0-9]{8,10})")
DATA_FILE = re.compile(r"rank-([0-9]{5,8})\.safetensors")
INDEX_FILE = re.compile(r"rank-([0-9]{5,8})\.json")

_MOST_DIMS, _MOST_NAME, _MOST_SENTENCE = 8, 300, 1000
MOST_PATH = 4096  # characters of a path that are stored
# One JSON file: 200,000 boxes, or the checksums of 2 TiB. In memory it takes twenty times as much.
MOST_JSON_BYTES = 32 * MIB

# The largest counter that a run may resume from: a float64, in which optimizers count, represents it exactly.
_MOST_COUNTED = 2**53
_Count = Annotated[int, Field(ge=0, lt=2**62)]


class BrokenCheckpointError(ValueError):
    """A checkpoint is incomplete or damaged: the message names the file and the fault."""


class StoredBox(Spec):
    """A box of a tensor in a data file: its tensor, its number type and its first byte."""

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
    """The contents of one data file. `sums` has a CRC-32 for each block; the last block may be shorter."""

    file: str
    num_bytes: _Count
    sums: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]
    boxes: tuple[StoredBox, ...]

    def faults(self) -> list[str]:
        """Impossible values in the index, as messages."""
        faults = list[str]()
        if not DATA_FILE.fullmatch(self.file):
            faults.append(say("a file is called {file}", file=repr(self.file)))
        if len(self.sums) != -(-self.num_bytes // BLOCK_BYTES):
            faults.append(
                say(
                    "{file} has {count} sums for {num_bytes:,} bytes",
                    file=self.file,
                    count=len(self.sums),
                    num_bytes=self.num_bytes,
                )
            )
        for stored in self.boxes:
            if stored.dtype not in DTYPE_BYTES:
                faults.append(
                    say(
                        "{file}: {name} is of number type {dtype}",
                        file=self.file,
                        name=stored.name,
                        dtype=repr(stored.dtype),
                    )
                )
            elif len(stored.box) != len(stored.full_shape) or not all(
                0 <= start < stop <= size for (start, stop), size in zip(stored.box, stored.full_shape, strict=True)
            ):
                faults.append(
                    say(
                        "{file}: {name} {full_shape} has no box {box}",
                        file=self.file,
                        name=stored.name,
                        full_shape=str(stored.full_shape),
                        box=str(stored.box),
                    )
                )
            elif stored.start_byte + stored.num_bytes > self.num_bytes:
                faults.append(say("{file}: {name} ends behind the file", file=self.file, name=stored.name))
        return faults or self._shared_bytes()

    def _shared_bytes(self) -> list[str]:
        """Boxes that overlap in the file, as messages: else a small file could claim any number of boxes."""
        in_order = sorted(self.boxes, key=lambda stored: stored.start_byte)
        return [
            say("{file}: {first} and {name} share bytes", file=self.file, first=previous.name, name=stored.name)
            for previous, stored in pairwise(in_order)
            if previous.start_byte + previous.num_bytes > stored.start_byte
        ]


class FileNote(Spec):
    """An entry of the manifest: an index file, the digest of its bytes, and the size of its data file."""

    index: str
    digest: str = Field(min_length=32, max_length=32)
    num_bytes: _Count  # of the data file


class StateHealth(Spec):
    """The health of a saved state. Causes against it: a number that is not finite, in the weights or in the step that
    led to them, or a loss above its band. Without a cause the state is healthy, and a run may resume from it."""

    cause: Literal["", "not finite", "spike"] = ""
    sentence: str = Field("", max_length=_MOST_SENTENCE)

    @property
    def is_healthy(self) -> bool:
        """True if no cause against the state is known."""
        return not self.cause


HEALTHY = StateHealth()


class SourcePlace(Spec):
    """A run's position in a data source: it has `had` so many samples of it, `first` of them before the current mix of
    sources began. The digest identifies the tokens, wherever the source lies; `path` is for people. A source that is
    no longer in the mix has weight 0."""

    path: str = Field(max_length=MOST_PATH)
    digest: str = Field(min_length=32, max_length=32)
    num_tokens: _Count
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    first: _Count
    had: _Count


class DataPlace(Spec):
    """A run's position in its data. The current mix of `sources` begins at the run's sample number `begun`, and its
    order follows from `seed`."""

    begun: _Count
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    sources: tuple[SourcePlace, ...] = Field(min_length=1, max_length=2 * largest.SOURCES)


class MeasuredLoss(Spec):
    """A loss in nats per token, and the digest of its validation set: only losses on one set are comparable."""

    loss: Annotated[float, Field(allow_inf_nan=False)]
    set_digest: str = Field(min_length=32, max_length=32)


class Manifest(Spec):
    """The description of the checkpoint after step `step`.

    A run resumes after the first `samples` of its data. It has skipped `passed_over` of these, because its state became
    unhealthy in them. `job` is the job with the plan that ran, and `state` holds the state that is no tensor: a few
    numbers. Earlier versions wrote no `health`, which counts as healthy, and no `data`; checkpoints of a user's own
    modules have no `data`, either. `losses` are the finite validation losses of this state, by the name of the set.
    `base` identifies the frozen weights to which adapters belong (base_weights.py)."""

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
    base: str = Field("", pattern=r"^([0-9a-f]{32})?$")
    files: tuple[FileNote, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(note.num_bytes for note in self.files)


def folder_name(step: int) -> str:
    """The name of the folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def data_file(rank: int) -> str:
    """The name of the file with a rank's boxes."""
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    """The name of the file with a rank's FileIndex."""
    return f"rank-{rank:05d}.json"


def digest_of(data: bytes) -> str:
    """BLAKE2b of some bytes: 32 hexadecimal characters."""
    return blake2b(data, digest_size=16).hexdigest()


def to_bytes(spec: FileIndex | Manifest) -> bytes:
    """The spec as JSON, and a last line with the digest of the bytes before it."""
    body = spec.model_dump_json().encode() + b"\n"
    return body + digest_of(body).encode() + b"\n"


def read_index(data: bytes, name: str) -> FileIndex:
    """The checked index in the bytes of the file `name`. Raises BrokenCheckpointError."""
    index = _read(FileIndex, data, name)
    if faults := index.faults():
        raise BrokenCheckpointError(say("{name}: {fault}", name=name, fault=faults[0]))
    return index


def read_manifest(data: bytes, name: str) -> Manifest:
    """The checked manifest in the bytes of the file `name`. Raises BrokenCheckpointError."""
    manifest = _read(Manifest, data, name)
    if manifest.format != FORMAT:
        raise BrokenCheckpointError(
            say(
                "{name} is of format {format}, and this version reads format {wanted}",
                name=name,
                format=manifest.format,
                wanted=FORMAT,
            )
        )
    if bad_names := [note.index for note in manifest.files if not INDEX_FILE.fullmatch(note.index)]:
        raise BrokenCheckpointError(say("{name} names a file {file}", name=name, file=repr(shortened(bad_names[0]))))
    if len({note.index for note in manifest.files}) < len(manifest.files):
        raise BrokenCheckpointError(say("{name} names a file twice", name=name))
    if fault := _count_fault(manifest):
        raise BrokenCheckpointError(say("{name} says {fault}", name=name, fault=fault))
    if not (is_finite(manifest.job) and is_finite(manifest.state)):
        raise BrokenCheckpointError(say("{name} has numbers that are none", name=name))
    if fault := _job_fault(manifest.job) or state_fault(manifest.state):
        raise BrokenCheckpointError(say("{name}: {fault}", name=name, fault=fault))
    return manifest


def _count_fault(manifest: Manifest) -> str:
    """Why the manifest's counters are impossible; "" if they are possible."""
    counts: dict[str, int] = {
        "samples": manifest.samples,
        "passed_over": manifest.passed_over,
        "optimizer_steps": manifest.optimizer_steps,
    }
    data = manifest.data
    counts |= {
        say("first sample of source {number}", number=n): source.first
        for n, source in enumerate(data.sources if data else ())
    }
    too_large = [
        say("{name} {count:,}", name=name, count=count) for name, count in counts.items() if count > _MOST_COUNTED
    ]
    if too_large:
        return say("{counts}, which no run reaches", counts=both(too_large))
    if data is None:
        return ""
    samples_of_mix = manifest.samples - data.begun
    if samples_of_mix < 0:
        return say(
            "that its data begin with sample {begun:,}, behind those that were had, {samples:,}",
            begun=data.begun,
            samples=manifest.samples,
        )
    for n, source in enumerate(data.sources):
        if not 0 <= source.had - source.first <= samples_of_mix:
            return say(
                "that {had:,} samples of source {number} were had, {first:,} of them before the last {last:,} of all "
                "sources",
                had=source.had,
                number=n,
                first=source.first,
                last=samples_of_mix,
            )
    return ""


def _job_fault(job: dict[str, Any]) -> str:
    """Why a stored value is not a job; "" if it looks like one. The job of another version may have other fields."""
    for section in ("model", "plan"):
        if section not in job:
            return say("its job has no {section}", section=section)
    not_sections = [name for name, fields in job.items() if name != "name" and not isinstance(fields, dict)]
    return say("its job's {section} is no section", section=repr(shortened(not_sections[0]))) if not_sections else ""


def _read(kind: type, data: bytes, name: str) -> Any:
    body, newline, digest = data[:-1].rpartition(b"\n")
    if not newline or digest != digest_of(body + newline).encode() or data[-1:] != b"\n":
        raise BrokenCheckpointError(say("{name} is not as it was written: its digest is another", name=name))
    try:
        # Pydantic's strict mode accepts a list for a tuple in JSON only, not in Python objects.
        return kind.model_validate_json(body, strict=True)  # type: ignore[attr-defined]
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": say("too deep"), "loc": ()}
        field = shortened(printable(".".join(map(str, first["loc"]))))
        raise BrokenCheckpointError(
            say("{name} can't be read: {field} {reason}", name=name, field=field, reason=first["msg"])
        ) from None


def optimizer_of(manifest: Manifest) -> OptimizerSpec:
    """The optimizer of a stored job, without fields that this version does not know. Raises BrokenCheckpointError."""
    stored = manifest.job.get("optimizer", {})
    known_fields = {name: value for name, value in stored.items() if name in OptimizerSpec.model_fields}
    try:
        return OptimizerSpec.model_validate(known_fields)
    except ValidationError as error:
        raise BrokenCheckpointError(
            say("its job's optimizer can't be: {reason}", reason=error.errors()[0]["msg"])
        ) from None


def in_words(health: StateHealth) -> str:
    """Why a state is not healthy, safe to print on a terminal; "healthy" if it is."""
    if health.is_healthy:
        return say("healthy")
    return shortened(" ".join(printable(health.sentence or health.cause).split()), _MOST_SENTENCE)


def describe_job(job: dict[str, Any]) -> str:
    """A summary of a stored job's plan: its degrees, its ZeRO level and its schedule."""
    plan = job["plan"]
    degrees = [f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if plan.get(axis, 1) != 1]
    words = [*degrees, f"zero {plan.get('zero', 0)}", str(plan.get("schedule", ""))]
    return ", ".join(shortened(printable(word)) for word in words)
