"""Resume a run from a checkpoint, under the job's current plan."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwright.config.base import PassingError, PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.collectives import all_reduce, all_reduce_max, barrier
from shardwright.parallel.comm.hang_watch import meet
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.boxes import full_shapes
from shardwright.train.checkpoint.kept import (
    in_order_to_load,
    indices_of,
    is_said_healthy,
    kept_by,
    manifest_of,
    mark_unhealthy,
    place_of,
    put_aside,
    steps_kept,
    told_health,
)
from shardwright.train.checkpoint.manifest import (
    BrokenCheckpointError,
    Manifest,
    StateHealth,
    describe_job,
    folder_name,
    optimizer_of,
)
from shardwright.train.checkpoint.other_job import differences, refuse_other_model
from shardwright.train.checkpoint.released_weights import ReleasedWeights
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of, take_correction_biases
from shardwright.train.checkpoint.state_part import StoredState
from shardwright.train.checkpoint.storage import LocalStorage, Storage, open_storage
from shardwright.train.checkpoint.weights_state import has_optimizer


class UnreadCheckpointError(PassingError):
    """A checkpoint exists, but a disk or a network can't deliver it now."""


@dataclass(frozen=True)
class Resumed:
    """The start of a run: its state, and `lines` for the user."""

    replica: Replica
    step: int = 0
    samples: int = 0
    passed_over: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    lines: tuple[str, ...] = ()


def begin(job: JobSpec, mesh: Mesh, folder: Path, weights_from: str = "") -> Resumed:
    """This rank's part of the job at the start of a run: from the newest healthy checkpoint that is whole; else from
    the newest whole one; else new, with the weights of the run `weights_from`, if given. PlanError if a checkpoint is
    of another model. Every rank calls this. Moves small collectives over the world, and those of `take_up`."""
    storage = open_storage(place_of(job, folder))
    has_begun = _has_begun(storage, mesh)  # then checkpoints have all weights that are trained
    released = None if has_begun and not job.model.is_adapted else released_weights_of(job)
    replica = _new(job, mesh, released)
    steps = _in_order(job, mesh, storage)
    manifest, lines = _load_first(job, mesh, replica, storage, steps)
    if manifest is not None:
        lines += told_health(storage, manifest, max(steps, default=0))
        lines += _going_on_lines(job, manifest, f"{storage.root}/{folder_name(manifest.step)}", weights_from)
        return Resumed(
            replica, manifest.step, manifest.samples, manifest.passed_over, manifest.state, manifest, tuple(lines)
        )
    if lines:  # checkpoints exist, but none is whole
        if mesh.rank == 0 and isinstance(storage, LocalStorage):
            lines += put_aside(job, folder)
        lines.append(say("beginning anew, at step 1"))
        barrier(mesh.world)
        # A checkpoint that is not whole may have been loaded in part.
        replica = _new(job, mesh, released_weights_of(job))
    if job.model.weights:
        lines.append(say("beginning with the weights of {weights}", weights=job.model.weights))
    if weights_from:
        lines += _take_weights(job, mesh, replica, weights_from)
    return Resumed(replica, lines=tuple(lines))


def _going_on_lines(job: JobSpec, manifest: Manifest, place: str, weights_from: str) -> list[str]:
    """Lines for the user on a run that goes on from the checkpoint at `place`: its step, and what has changed since."""
    going_on = say("going on after step {step} from {place}", step=manifest.step, place=place)
    if manifest.job.get("plan") != job.plan.model_dump(mode="json"):
        going_on = say("{going_on}, written under {plan}", going_on=going_on, plan=describe_job(manifest.job))
    lines = [going_on, *differences(manifest.job, job)]
    if weights_from:
        lines.append(
            say(
                "note: the weights of --from {weights_from} are not taken: this run has begun already",
                weights_from=weights_from,
            )
        )
    return lines


def _take_weights(job: JobSpec, mesh: Mesh, replica: Replica, weights_from: str) -> list[str]:
    """Load the weights of another run's newest healthy checkpoint, and return lines for the user. Raises PlanError if
    that run has none that is whole. Every rank calls this."""
    subject = say("weights of {run}", run=weights_from)
    storage, _ = kept_by(weights_from, subject)
    steps = _in_order(job, mesh, storage)
    manifest, lines = _load_first(job, mesh, replica, storage, steps, weights_alone=True)
    if manifest is None:
        raise PlanError(subject, [*lines, say("no checkpoint is whole; name the folder of another run")])
    place = f"{storage.root}/{folder_name(manifest.step)}"
    return [
        *lines,
        *told_health(storage, manifest, max(steps, default=0)),
        say("beginning with the weights of {weights}", weights=place),
    ]


def _has_begun(storage: Storage, mesh: Mesh) -> bool:
    """True if rank 0 sees a checkpoint: then the released weights need not exist."""
    has_checkpoint = torch.tensor(float(bool(steps_kept(storage))) if mesh.rank == 0 else 0.0, device=mesh.device)
    return bool(mesh.numbers(all_reduce_max(has_checkpoint.reshape(1), mesh.world))[0])


def _new(job: JobSpec, mesh: Mesh, released: ReleasedWeights | None) -> Replica:
    """This rank's part of a new job, with its initial weights."""
    replica = build(job, mesh, initial_values(job, released))
    take_correction_biases(replica.stages, released)
    return replica


def go_back(job: JobSpec, mesh: Mesh, replica: Replica, folder: Path) -> tuple[Manifest | None, list[str]]:
    """Roll a running replica back to the newest healthy checkpoint that is whole. Returns its manifest, None if there
    is none, and lines for the user. Every rank calls this."""
    storage = open_storage(place_of(job, folder))
    steps = [step for step in _in_order(job, mesh, storage) if is_said_healthy(storage, step)]
    return _load_first(job, mesh, replica, storage, steps)


def newest_healthy(job: JobSpec, mesh: Mesh, folder: Path) -> int:
    """The step of the newest healthy checkpoint that rank 0 sees; 0 if there is none. Every rank calls this. Moves one
    small all-reduce over the world."""
    storage, step = open_storage(place_of(job, folder)), 0
    if mesh.rank == 0:
        step = next((kept_step for kept_step in steps_kept(storage) if is_said_healthy(storage, kept_step)), 0)
    step_tensor = torch.tensor([step], dtype=torch.int64, device=mesh.device)
    return int(mesh.numbers(all_reduce_max(step_tensor, mesh.world))[0])


def doubt(job: JobSpec, folder: Path, step: int, sentence: str) -> None:
    """Mark the checkpoint of this step, if it exists, as not healthy: its weights turned out to be useless. The last
    healthy checkpoint is not marked. Rank 0 calls this."""
    storage = open_storage(place_of(job, folder))
    healthy_steps = [
        kept_step for kept_step in steps_kept(storage) if kept_step <= step and is_said_healthy(storage, kept_step)
    ]
    if step in healthy_steps and len(healthy_steps) > 1:
        with suppress(OSError, BrokenCheckpointError):  # then its manifest stays as it was
            mark_unhealthy(storage, step, StateHealth(cause="not finite", sentence=sentence))


def _in_order(job: JobSpec, mesh: Mesh, storage: Storage) -> list[int]:
    """The steps of the checkpoints in the order in which they are tried, on rank 0; an empty list on other ranks."""
    steps = steps_kept(storage) if mesh.rank == 0 else []
    return in_order_to_load(storage, steps, takes_spikes=job.health.spike == "ignore")


def _load_first(
    job: JobSpec, mesh: Mesh, replica: Replica, storage: Storage, steps: list[int], weights_alone: bool = False
) -> tuple[Manifest | None, list[str]]:
    """Load the first of these checkpoints that is whole; rank 0's `steps` count. Returns its manifest, None if none is
    whole, and lines for the user. The replica may have parts of the checkpoints that are not whole."""
    saved_state, steps, lines = SavedState(replica, mesh), list(steps), list[str]()
    while True:
        chosen = torch.tensor(steps.pop(0) if steps else -1, dtype=torch.int64, device=mesh.device)
        step = int(mesh.numbers(all_reduce_max(chosen, mesh.world).reshape(1))[0])
        if step < 0:
            return None, lines
        reading = _read(job, saved_state, storage, step, weights_alone)
        # Ranks may differ in reading time by more than a collective may wait: some read more, or from slower storage.
        meet(mesh.watch, mesh.rank, mesh.world.size, say("reading {folder}", folder=folder_name(step)))
        failures = torch.tensor([float(bool(reading.fault)), float(reading.is_unread)], device=mesh.device)
        num_bad, num_unread = map(int, mesh.numbers(all_reduce(failures, mesh.world)))
        if num_unread:  # the checkpoint may be whole, so an older one must not replace it
            unread = say(
                "{place} can't be read now by {ranks}",
                place=f"{storage.root}/{folder_name(step)}",
                ranks=counted_phrase(num_unread, "rank"),
            )
            if reading.is_unread:
                unread = say("{fault}: {reason}", fault=unread, reason=reading.fault)
            raise UnreadCheckpointError(
                say("{fault}; mend that, and give the same command again, without --fresh", fault=unread)
            )
        if not num_bad and reading.manifest is not None and reading.stored is not None:
            saved_state.take_up(reading.stored)
            return reading.manifest, lines + _optimizer_note(job, reading.manifest, reading.stored)
        broken = say(
            "{name} is not whole, as {ranks} found", name=folder_name(step), ranks=counted_phrase(num_bad, "rank")
        )
        if reading.fault:
            broken = say("{name} is not whole: {reason}", name=folder_name(step), reason=reading.fault)
        lines.append(say("{fault}; an older one is taken, if there is one", fault=broken))


@dataclass(frozen=True)
class _Reading:
    """Result of reading this rank's part of a checkpoint: what was read, or why it could not be. It `is_unread` if a
    disk or a network failed."""

    manifest: Manifest | None = None
    stored: StoredState | None = None
    fault: str = ""
    is_unread: bool = False


def _read(job: JobSpec, saved_state: SavedState, storage: Storage, step: int, weights_alone: bool) -> _Reading:
    """Read this rank's part of a checkpoint. PlanError if it is of another model."""
    try:
        manifest = manifest_of(storage, step)
        refuse_other_model(manifest, job, storage, weights_alone)
        indices = indices_of(storage, manifest)
        shapes = full_shapes(indices)
        stored = StoredState(
            shapes,
            manifest.optimizer_steps,
            weights_alone,
            optimizer_anew=not has_optimizer(job, shapes),
            scaled_by=1.0 if weights_alone else saved_state.take_numbers(manifest.state),
        )
        saved_state.load(stored, storage, folder_name(step), indices)
    except BrokenCheckpointError as error:
        return _Reading(fault=error_text(error))
    except OSError as error:
        return _Reading(fault=error_text(error), is_unread=True)
    return _Reading(manifest, stored)


def _optimizer_note(job: JobSpec, manifest: Manifest, stored: StoredState) -> list[str]:
    """A line for the user if the optimizer of a run that resumes begins anew."""
    if stored.weights_alone or not stored.optimizer_anew or not manifest.optimizer_steps:
        return []
    return [
        say(
            "note: optimizer.name {name} begins anew, with the weights of {place}: what {old} remembered is not what "
            "it needs",
            name=repr(job.optimizer.name),
            place=folder_name(manifest.step),
            old=repr(optimizer_of(manifest).name),
        )
    ]
