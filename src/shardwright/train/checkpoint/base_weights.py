"""The identity of the weights that adapters are trained beside: a checkpoint of adapters has no others, so it is right
with these alone. Torch is not needed."""

from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import path_of
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.user_file import system_reason
from shardwright.train.checkpoint.manifest import Manifest, digest_of

_PLACES, _PART_BYTES = 256, 4096  # parts of a file that are compared, evenly spread over it, and bytes of each


def base_digest(job: JobSpec) -> str:
    """A digest of the frozen weights of a job with adapters: of parts of each safetensors file of its folder, or of the
    seed of random ones; "" for a job without adapters. Raises PlanError if a file can't be read."""
    if not job.model.is_adapted:
        return ""
    if not job.model.weights:
        return digest_of(f"random weights of seed {job.run.seed}".encode())
    folder = Path(path_of(job.model.weights).parent)
    try:
        return digest_of("".join(_digest_of_file(file) for file in sorted(folder.glob("*.safetensors"))).encode())
    except OSError as error:
        raise PlanError(
            "model.weights", [say("{file}: {reason}; check the path", file=error.filename, reason=system_reason(error))]
        ) from None


def _digest_of_file(file: Path) -> str:
    """A digest of a file's size, its beginning with the names and shapes of tensors, and parts of its values."""
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as opened:
        for place in range(_PLACES):
            opened.seek(place * size // _PLACES)
            parts.append(opened.read(_PART_BYTES))
    return digest_of(b"".join(parts))


def base_fault(manifest: Manifest, job: JobSpec) -> str:
    """A fault if the adapters of a checkpoint were trained beside other weights than the job's; "" if not."""
    if not job.model.is_adapted or manifest.base == base_digest(job):
        return ""
    model, seed = manifest.job["model"], manifest.job.get("run", {}).get("seed", 0)
    if weights := model.get("weights"):
        return say(
            "its adapters were trained beside the weights of {weights}, and those of the job differ; set "
            "model.weights to a folder with the same weights",
            weights=weights,
        )
    return say(
        "its adapters were trained beside random weights of run.seed {seed}, and those of the job differ; leave "
        "model.weights out, and set run.seed to {seed}",
        seed=seed,
    )
