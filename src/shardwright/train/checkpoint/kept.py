"""The checkpoints that a run has: which are there, which are whole, and which may go. Torch is not needed."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.job import JobSpec
from shardwright.train.checkpoint.checked_blocks import CheckedFile, telling_of_damage
from shardwright.train.checkpoint.manifest import (
    DATA_FILE,
    INDEX_FILE,
    LATEST,
    MANIFEST,
    MOST_JSON_BYTES,
    STEP_FOLDER,
    BrokenCheckpointError,
    FileIndex,
    FileNote,
    Manifest,
    StateHealth,
    digest_of,
    folder_name,
    in_words,
    optimizer_of,
    read_index,
    read_manifest,
    to_bytes,
)
from shardwright.train.checkpoint.retention import best_step, healthy_first, steps_to_remove
from shardwright.train.checkpoint.storage import LocalStorage, Storage, open_storage, read_whole
from shardwright.train.checkpoint.whole_tensors import check_kinds, whole_tensors
from shardwright.train.run_files import CHECKPOINTS_BELOW, METRICS


def place_of(job: JobSpec, folder: Path) -> str:
    """Where the checkpoints of a run lie: a folder or an address."""
    return job.checkpoint.path or str(folder / CHECKPOINTS_BELOW)


def steps_kept(storage: Storage) -> list[int]:
    """The steps of all checkpoints that have a manifest, newest first."""
    named = {name: STEP_FOLDER.fullmatch(name) for name in storage.names()}
    steps = [int(match[1]) for name, match in named.items() if match and folder_name(int(match[1])) == name]
    return sorted((step for step in steps if MANIFEST in storage.names(folder_name(step))), reverse=True)


def manifest_of(storage: Storage, step: int) -> Manifest:
    """The manifest of a checkpoint. Raises BrokenCheckpointError."""
    manifest = read_manifest(_read(storage, f"{folder_name(step)}/{MANIFEST}"), MANIFEST)
    if manifest.step != step:
        raise BrokenCheckpointError(f"{folder_name(step)} says that it is of step {manifest.step}")
    return manifest


def indices_of(storage: Storage, manifest: Manifest) -> list[FileIndex]:
    """The indices of its files. Raises BrokenCheckpointError."""
    found = []
    for note in manifest.files:
        data = _read(storage, f"{folder_name(manifest.step)}/{note.index}")
        if digest_of(data) != note.digest:
            raise BrokenCheckpointError(f"{note.index} is not as it was written: its digest is another")
        index = read_index(data, note.index)
        if (index.file, index.num_bytes) != (note.index.replace(".json", ".safetensors"), note.num_bytes):
            raise BrokenCheckpointError(f"{note.index} is of {index.num_bytes:,} bytes of {index.file}, and the "
                                        f"manifest says {note.num_bytes:,}")  # fmt: skip
        found.append(index)
    check_kinds(found, manifest.optimizer_steps, optimizer_of(manifest))
    return found


def check_whole(storage: Storage, step: int) -> Manifest:
    """Read every byte of a checkpoint. Raises BrokenCheckpointError."""
    manifest = manifest_of(storage, step)
    indices = indices_of(storage, manifest)
    whole_tensors(indices)
    for index in indices:
        CheckedFile(storage, f"{folder_name(step)}/{index.file}", index).check_all()
    return manifest


def make_whole(storage: Storage, manifest: Manifest, index_files: list[str]) -> None:
    """Say, durably, that a checkpoint whose files are durable is there, and then that it is the latest, if it is
    healthy. Raises OSError, BrokenCheckpointError."""
    folder, notes = folder_name(manifest.step), []
    for name in index_files:
        data = _read(storage, f"{folder}/{name}")
        notes.append(FileNote(index=name, digest=digest_of(data), num_bytes=read_index(data, name).num_bytes))
    whole = manifest.model_copy(update={"files": tuple(notes)})
    storage.replace(f"{folder}/{MANIFEST}", to_bytes(whole))
    with suppress(OSError):  # it is for people, and the checkpoint is whole without it
        if manifest.health.is_healthy:
            storage.replace(LATEST, folder.encode() + b"\n")


def put_aside(job: JobSpec, folder: Path) -> list[str]:
    """Move the checkpoints of a run, and its metrics, out of the way, for it begins anew. Returns lines for the user.
    PlanError where they lie at an address."""
    storage = open_storage(place_of(job, folder))
    if not steps_kept(storage):
        return []
    place = storage.root
    if not isinstance(storage, LocalStorage):
        fault = f"{place} has checkpoints, and is not emptied; remove them there, or name another checkpoint.path"
        raise PlanError("train --fresh", [fault])
    number = next(number for number in count(1) if not os.path.lexists(f"{place}.before-{number}"))
    aside = f"{place}.before-{number}"
    os.mkdir(aside)
    for name in storage.names():
        if STEP_FOLDER.fullmatch(name) or name == LATEST:
            os.rename(os.path.join(place, name), os.path.join(aside, name))
    if (folder / METRICS).is_file():
        os.rename(folder / METRICS, os.path.join(aside, METRICS))
    return [f"the checkpoints and metrics that were there are in {aside}"]


def kept_by(run: str, subject: str) -> tuple[Storage, list[int]]:
    """Where the checkpoints of a run's folder lie, or of the folder or address that has them, and their steps, newest
    first. PlanError, of the subject, if there are none."""
    for place in (run, f"{run}/checkpoints") if "://" in run else (os.path.join(run, "checkpoints"), run):
        storage = open_storage(place)
        if run and (steps := steps_kept(storage)):
            return storage, steps
    way_out = "name a run's folder, as runs/NAME, or for weights a folder with a config.json"
    if STEP_FOLDER.fullmatch(os.path.basename(os.path.normpath(run))):
        fault = f"{run} is one checkpoint; name the folder that it is in"
    elif "://" not in run and not os.path.isdir(os.path.expanduser(run)):
        fault = f"there is no folder {run!r}; {way_out}"
    else:
        fault = f"{run} has no checkpoint; {way_out}"
    raise PlanError(subject, [fault])


def remove_old(storage: Storage, spec: CheckpointSpec, newest: int, pinned: Collection[int] = ()) -> None:
    """Remove what need not be kept beside the checkpoint of the step `newest`, oldest first, and nothing `pinned`."""
    is_healthy = partial(is_said_healthy, storage)
    for step in steps_to_remove(steps_kept(storage), newest, spec, is_healthy, pinned):
        remove_checkpoint(storage, folder_name(step))


def kept_manifests(storage: Storage) -> dict[int, Manifest]:
    """The manifests of the existing checkpoints, by step; those that can't be read are left out."""
    manifests = {}
    for step in steps_kept(storage):
        with suppress(BrokenCheckpointError, OSError):
            manifests[step] = manifest_of(storage, step)
    return manifests


def best_of_sets(manifests: Mapping[int, Manifest]) -> list[int]:
    """The steps of the checkpoints with the least loss on each set of which some run kept the best, in order.

    Their jobs say on which set (checkpoint.keep_best), and the digest tells sets apart: one by another name is the
    same, one of other text is not. So the best by a set stays though a later run keeps the best by another. A state
    whose weights are no numbers is the best of nothing.
    """
    losses = {step: {one.set_digest: one.loss for one in of.losses.values()} for step, of in manifests.items()}
    names = {step: str(of.job.get("checkpoint", {}).get("keep_best")) for step, of in manifests.items()}
    digests = {of.losses[name].set_digest for step, of in manifests.items() if (name := names[step]) in of.losses}
    steps = [step for step, of in manifests.items() if of.health.cause != "not finite"]
    best = {best_step({step: losses[step].get(digest) for step in steps}) for digest in digests}
    return sorted(step for step in best if step is not None)


def is_said_healthy(storage: Storage, step: int) -> bool:
    """True if a checkpoint says that it is healthy. One that can't say so is not: it keeps none from staying."""
    try:
        return manifest_of(storage, step).health.is_healthy
    except (BrokenCheckpointError, OSError):
        return False


def in_order_to_load(storage: Storage, steps: Sequence[int], takes_spikes: bool = False) -> list[int]:
    """The steps of checkpoints in the order in which one is looked for to go on from: healthy ones newest first, then
    those that are not. One that can't be read stays at its place among the healthy: whoever loads it says why.
    `takes_spikes`: a loss above its band is nothing against a checkpoint."""

    def is_taken(step: int) -> bool:
        try:
            cause = manifest_of(storage, step).health.cause
        except (BrokenCheckpointError, OSError):
            return True
        return not cause or (takes_spikes and cause == "spike")

    return healthy_first(steps, is_taken)


def mark_unhealthy(storage: Storage, step: int, health: StateHealth) -> None:
    """Say of a checkpoint, durably, that it is not healthy after all. Raises OSError, BrokenCheckpointError."""
    manifest = manifest_of(storage, step)
    storage.replace(f"{folder_name(step)}/{MANIFEST}", to_bytes(manifest.model_copy(update={"health": health})))
    healthy = next((kept for kept in steps_kept(storage) if is_said_healthy(storage, kept)), None)
    with suppress(OSError):  # it is for people
        if healthy is None:
            storage.remove(LATEST)
        else:
            storage.replace(LATEST, folder_name(healthy).encode() + b"\n")


def remove_unfinished_checkpoints(storage: Storage) -> None:
    """Remove what broken writes left: folders without a manifest."""
    for name in storage.names():
        if STEP_FOLDER.fullmatch(name) and MANIFEST not in storage.names(name):
            remove_checkpoint(storage, name)


def remove_checkpoint(storage: Storage, folder: str) -> None:
    """Remove the files of a checkpoint, its manifest first, and no others."""
    names = storage.names(folder)
    ours = [n for n in names if n.startswith(MANIFEST) or DATA_FILE.fullmatch(n) or INDEX_FILE.fullmatch(n)]
    with suppress(OSError):  # what can't be removed takes room, and harms nobody
        for name in sorted(ours, key=lambda name: not name.startswith(MANIFEST)):
            storage.remove(f"{folder}/{name}")
        storage.remove_folder(folder)


def _read(storage: Storage, name: str) -> bytes:
    with telling_of_damage(name):
        return read_whole(storage, name, MOST_JSON_BYTES)


def told_health(storage: Storage, manifest: Manifest, newest: int, is_asked: bool = False) -> list[str]:
    """Lines for where the `newest` checkpoint, 0 where it is not known here, is not healthy, or even the one that was
    taken is not. `is_asked`: somebody named it."""
    health, name = manifest.health, folder_name(manifest.step)
    if not health.is_healthy:
        others = f"{name} is not healthy" if is_asked else f"no checkpoint is healthy; {name} is taken"
        return [f"note: {others}: {in_words(health)}"]
    if is_asked or newest in (0, manifest.step):
        return []
    try:
        other = manifest_of(storage, newest).health
    except (BrokenCheckpointError, OSError):
        return []  # it was said already that it is not whole
    if other.is_healthy:
        return []
    way_out = ' (health.spike = "ignore" takes such ones)' if other.cause == "spike" else ""
    return [f"{folder_name(newest)} is not healthy: {in_words(other)}; {name}, the last healthy one, is taken{way_out}"]
