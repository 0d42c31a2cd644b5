"""The checkpoints that a run keeps: list, check, commit and remove them. Torch is not needed.

A checkpoint is kept if it has a manifest, and whole if every byte is as it was written.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import count, islice
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import any_of, say
from shardwright.config.run_file_names import CHECKPOINTS_BELOW, METRICS
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
    index_file,
    optimizer_of,
    read_index,
    read_manifest,
    to_bytes,
)
from shardwright.train.checkpoint.storage import LocalStorage, Storage, open_storage, read_whole
from shardwright.train.checkpoint.whole_tensors import check_kinds, whole_tensors


def place_of(job: JobSpec, folder: Path) -> str:
    """The folder or the address of a run's checkpoints."""
    return job.checkpoint.path or str(folder / CHECKPOINTS_BELOW)


def steps_kept(storage: Storage) -> list[int]:
    """The steps of all checkpoints that have a manifest, newest first."""
    matches = {name: STEP_FOLDER.fullmatch(name) for name in storage.names()}
    steps = [int(match[1]) for name, match in matches.items() if match and folder_name(int(match[1])) == name]
    return sorted((step for step in steps if MANIFEST in storage.names(folder_name(step))), reverse=True)


def manifest_of(storage: Storage, step: int) -> Manifest:
    """The manifest of a checkpoint. Raises BrokenCheckpointError."""
    manifest = read_manifest(_read(storage, f"{folder_name(step)}/{MANIFEST}"), MANIFEST)
    if manifest.step != step:
        raise BrokenCheckpointError(
            say("{name} says that it is of step {step}", name=folder_name(step), step=manifest.step)
        )
    return manifest


def indices_of(storage: Storage, manifest: Manifest) -> list[FileIndex]:
    """The indices of a checkpoint's files, checked. Raises BrokenCheckpointError."""
    indices = []
    for note in manifest.files:
        data = _read(storage, f"{folder_name(manifest.step)}/{note.index}")
        if digest_of(data) != note.digest:
            raise BrokenCheckpointError(
                say("{index} is not as it was written: its digest is another", index=note.index)
            )
        index = read_index(data, note.index)
        if (index.file, index.num_bytes) != (note.index.replace(".json", ".safetensors"), note.num_bytes):
            raise BrokenCheckpointError(
                say(
                    "{index} is of {num_bytes:,} bytes of {file}, and the manifest says {noted:,}",
                    index=note.index,
                    num_bytes=index.num_bytes,
                    file=index.file,
                    noted=note.num_bytes,
                )
            )
        indices.append(index)
    check_kinds(indices, manifest.optimizer_steps, optimizer_of(manifest))
    return indices


def check_whole(storage: Storage, step: int) -> Manifest:
    """Read and check every byte of a checkpoint. Returns its manifest. Raises BrokenCheckpointError."""
    manifest = manifest_of(storage, step)
    indices = indices_of(storage, manifest)
    whole_tensors(indices)
    for index in indices:
        CheckedFile(storage, f"{folder_name(step)}/{index.file}", index).check_all()
    return manifest


def make_whole(storage: Storage, manifest: Manifest, num_ranks: int) -> None:
    """Commit a checkpoint whose files, one of each rank, are durable: write its manifest, durably, and then, if it is
    healthy, its name to `latest`. Raises OSError, BrokenCheckpointError."""
    folder, notes = folder_name(manifest.step), []
    for name in map(index_file, range(num_ranks)):
        data = _read(storage, f"{folder}/{name}")
        notes.append(FileNote(index=name, digest=digest_of(data), num_bytes=read_index(data, name).num_bytes))
    complete = manifest.model_copy(update={"files": tuple(notes)})
    storage.replace(f"{folder}/{MANIFEST}", to_bytes(complete))
    with suppress(OSError):  # `latest` is for people only: the checkpoint is committed without it
        if manifest.health.is_healthy:
            storage.replace(LATEST, folder.encode() + b"\n")


def put_aside(job: JobSpec, folder: Path) -> list[str]:
    """Move a run's checkpoints and metrics to another folder, because the run starts anew. Returns lines for the user.
    PlanError if the checkpoints lie at an address."""
    storage = open_storage(place_of(job, folder))
    if not steps_kept(storage):
        return []
    place = storage.root
    if not isinstance(storage, LocalStorage):
        fault = say(
            "{place} has checkpoints, and is not emptied; remove them there, or name another checkpoint.path",
            place=place,
        )
        raise PlanError("train --fresh", [fault])
    number = next(number for number in count(1) if not os.path.lexists(f"{place}.before-{number}"))
    backup = f"{place}.before-{number}"
    os.mkdir(backup)
    for name in storage.names():
        if STEP_FOLDER.fullmatch(name) or name == LATEST:
            os.rename(os.path.join(place, name), os.path.join(backup, name))
    if (folder / METRICS).is_file():
        os.rename(folder / METRICS, os.path.join(backup, METRICS))
    return [say("the checkpoints and metrics that were there are in {backup}", backup=backup)]


def kept_by(run: str, subject: str) -> tuple[Storage, list[int]]:
    """The storage of a run's checkpoints, and their steps, newest first. `run` is the run's folder, or the folder or
    address of the checkpoints. PlanError about `subject` if it has none."""
    below = os.path.join(run, CHECKPOINTS_BELOW)
    for place in (run, f"{run}/{CHECKPOINTS_BELOW}") if "://" in run else (below, run):
        storage = open_storage(place)
        if run and (steps := steps_kept(storage)):
            return storage, steps
    way_out = say("name a run's folder, as runs/NAME, or for weights a folder with a config.json")
    if STEP_FOLDER.fullmatch(os.path.basename(os.path.normpath(run))):
        fault = say("{run} is one checkpoint; name the folder that it is in", run=run)
    elif "://" not in run and not os.path.isdir(os.path.expanduser(run)):
        if near := _near_runs(run):
            way_out = say("did you mean {meant}?", meant=any_of(near))
        fault = say("there is no folder {run}; {way_out}", run=repr(run), way_out=way_out)
    else:
        fault = say("{run} has no checkpoint; {way_out}", run=run, way_out=way_out)
    raise PlanError(subject, [fault])


_RUNS = "runs"  # the usual folder of runs
_MOST_RUNS = 10_000  # that are looked at


def _near_runs(run: str) -> list[str]:
    """Folders of runs whose names are like one that is not there: beside it, or among the usual runs."""
    folder, name = os.path.split(os.path.normpath(os.path.expanduser(run)))
    for place in dict.fromkeys((folder, _RUNS)):
        with suppress(OSError, ValueError), os.scandir(place or os.curdir) as entries:
            names = [entry.name for entry in islice(entries, _MOST_RUNS) if entry.is_dir()]
            near = [os.path.join(place, one) for one in get_close_matches(name, names, n=2)]
            if runs := [one for one in near if os.path.exists(os.path.join(one, METRICS))]:
                return runs
    return []


def remove_old(storage: Storage, spec: CheckpointSpec, newest: int, pinned: Collection[int] = ()) -> None:
    """Remove, oldest first, the checkpoints that need not be kept beside the one of the step `newest`, but no `pinned`
    one."""
    is_healthy = partial(is_said_healthy, storage)
    for step in steps_to_remove(steps_kept(storage), newest, spec, is_healthy, pinned):
        remove_checkpoint(storage, folder_name(step))


def kept_manifests(storage: Storage) -> dict[int, Manifest]:
    """The manifests of the existing checkpoints, by step, without unreadable ones."""
    manifests = {}
    for step in steps_kept(storage):
        with suppress(BrokenCheckpointError, OSError):
            manifests[step] = manifest_of(storage, step)
    return manifests


def best_of_sets(manifests: Mapping[int, Manifest]) -> list[int]:
    """The steps of the best checkpoints, sorted: for each validation set by which a run keeps its best, the one with
    the least loss.

    The jobs name these sets (checkpoint.keep_best). A set is identified by its digest: under another name it is the
    same set, with other text it is another set. So the best checkpoint by a set stays, even if a later run keeps its
    best by another set. A state with weights that are not finite is never the best.
    """
    losses = {
        step: {measured.set_digest: measured.loss for measured in manifest.losses.values()}
        for step, manifest in manifests.items()
    }
    names = {step: str(manifest.job.get("checkpoint", {}).get("keep_best")) for step, manifest in manifests.items()}
    digests = {
        manifest.losses[name].set_digest
        for step, manifest in manifests.items()
        if (name := names[step]) in manifest.losses
    }
    finite_steps = [step for step, manifest in manifests.items() if manifest.health.cause != "not finite"]
    best_steps = {best_step({step: losses[step].get(digest) for step in finite_steps}) for digest in digests}
    return sorted(step for step in best_steps if step is not None)


def is_said_healthy(storage: Storage, step: int) -> bool:
    """True if the manifest of a checkpoint says that it is healthy. An unreadable checkpoint counts as not healthy: so
    it does not use up the number of healthy ones to keep."""
    try:
        return manifest_of(storage, step).health.is_healthy
    except (BrokenCheckpointError, OSError):
        return False


def in_order_to_load(storage: Storage, steps: Sequence[int], takes_spikes: bool = False) -> list[int]:
    """The steps of checkpoints in the order in which a resume tries them: healthy ones, newest first, then the others.
    An unreadable checkpoint keeps its place among the healthy ones: loading it reports the fault. With `takes_spikes`,
    a checkpoint with a loss above its band counts as healthy."""

    def is_taken(step: int) -> bool:
        try:
            cause = manifest_of(storage, step).health.cause
        except (BrokenCheckpointError, OSError):
            return True
        return not cause or (takes_spikes and cause == "spike")

    return healthy_first(steps, is_taken)


def mark_unhealthy(storage: Storage, step: int, health: StateHealth) -> None:
    """Write, durably, to a checkpoint's manifest that it is not healthy. Raises OSError, BrokenCheckpointError."""
    manifest = manifest_of(storage, step)
    storage.replace(f"{folder_name(step)}/{MANIFEST}", to_bytes(manifest.model_copy(update={"health": health})))
    latest = next((kept_step for kept_step in steps_kept(storage) if is_said_healthy(storage, kept_step)), None)
    with suppress(OSError):  # `latest` is for people only
        if latest is None:
            storage.remove(LATEST)
        else:
            storage.replace(LATEST, folder_name(latest).encode() + b"\n")


def remove_unfinished_checkpoints(storage: Storage) -> None:
    """Remove the folders without a manifest, which interrupted saves left."""
    for name in storage.names():
        if STEP_FOLDER.fullmatch(name) and MANIFEST not in storage.names(name):
            remove_checkpoint(storage, name)


def remove_checkpoint(storage: Storage, folder: str) -> None:
    """Remove the files of a checkpoint, its manifest first. Other files in its folder stay."""
    names = storage.names(folder)
    files = [n for n in names if n.startswith(MANIFEST) or DATA_FILE.fullmatch(n) or INDEX_FILE.fullmatch(n)]
    with suppress(OSError):  # a file that can't be removed takes space, but does no harm
        for name in sorted(files, key=lambda name: not name.startswith(MANIFEST)):
            storage.remove(f"{folder}/{name}")
        storage.remove_folder(folder)


def _read(storage: Storage, name: str) -> bytes:
    with telling_of_damage(name):
        return read_whole(storage, name, MOST_JSON_BYTES)


def told_health(storage: Storage, manifest: Manifest, newest: int, is_asked: bool = False) -> list[str]:
    """Lines for the user if the loaded checkpoint of this manifest is not healthy, or if the `newest` one (its step, 0
    if unknown on this rank) is not, and was not loaded for that. `is_asked`: the user named the checkpoint."""
    health, name = manifest.health, folder_name(manifest.step)
    if not health.is_healthy:
        if is_asked:
            return [say("note: {name} is not healthy: {cause}", name=name, cause=in_words(health))]
        return [say("note: no checkpoint is healthy; {name} is taken: {cause}", name=name, cause=in_words(health))]
    if is_asked or newest in (0, manifest.step):
        return []
    try:
        skipped = manifest_of(storage, newest).health
    except (BrokenCheckpointError, OSError):
        return []  # the attempt to load it has reported the fault
    if skipped.is_healthy:
        return []
    taken = say(
        "{newest} is not healthy: {cause}; {name}, the last healthy one, is taken",
        newest=folder_name(newest),
        cause=in_words(skipped),
        name=name,
    )
    if skipped.cause == "spike":
        return [say('{taken} (health.spike = "ignore" takes such ones)', taken=taken)]
    return [taken]


# Retention, and the order of resuming. Both depend on the health of a checkpoint (manifest.py, `StateHealth`): a
# diverging run writes checkpoints that are newer than the last healthy one, and a rule by age alone would remove that.

# A function that returns True if the checkpoint of a step is healthy.
IsHealthy = Callable[[int], bool]


def steps_to_remove(
    steps: Sequence[int], newest: int, spec: CheckpointSpec, is_healthy: IsHealthy, pinned: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints may be removed once the checkpoint of the step `newest` exists, oldest first.

    The newest stays, and so do the `keep_last` newest healthy ones; if there are fewer healthy ones, the newest others
    make up the number. So the last healthy one is never removed, and if `keep_last` healthy ones exist, a newest one
    that is not healthy stays in addition to them. Checkpoints of `keep_every`, and `pinned` ones, stay too, and do not
    count. Steps later than `newest` stay: the run resumed from an older checkpoint, and had reasons not to load them.
    """
    candidates = sorted({step for step in steps if step <= newest}, reverse=True)
    healthy = list[int]()
    for step in candidates:  # newest first, and no more than needed: `is_healthy` reads a file
        if len(healthy) < spec.keep_last and is_healthy(step):
            healthy.append(step)
    others = [step for step in candidates if step not in healthy]
    kept = {newest, *healthy, *others[: spec.keep_last - len(healthy)], *pinned}
    return [
        step
        for step in reversed(candidates)
        if step not in kept and not (spec.keep_every and step % spec.keep_every == 0)
    ]


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """The step with the least finite loss, the first if several are equal; None if no loss is finite."""
    finite = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(finite)[1] if finite else None


def healthy_first(steps: Sequence[int], is_healthy: IsHealthy) -> list[int]:
    """The steps in the order in which a resume tries them: the healthy ones, newest first, then the others, newest
    first."""
    newest_first = sorted(steps, reverse=True)
    health = {step: is_healthy(step) for step in newest_first}
    return sorted(newest_first, key=lambda step: not health[step])
