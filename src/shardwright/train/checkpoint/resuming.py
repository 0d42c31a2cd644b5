"""The checkpoint from which a run goes on, under the plan that it has now."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwright.config.base import PassingError, PlanError
from shardwright.config.job import JobSpec
from shardwright.config.units import counted
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
from shardwright.train.checkpoint.replica_state import has_optimizer, take_up, wanted_boxes
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of, take_choice_biases
from shardwright.train.checkpoint.storage import LocalStorage, Storage, open_storage


class UnreadCheckpointError(PassingError):
    """A checkpoint is there, and a disk or a network does not give it now."""


@dataclass(frozen=True)
class Resumed:
    """Where a run begins. `said` are lines for the user."""

    replica: Replica
    step: int = 0
    samples: int = 0
    passed_over: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    said: tuple[str, ...] = ()


def begin(job: JobSpec, mesh: Mesh, folder: Path, weights_from: str = "") -> Resumed:
    """This rank's part of the job: as the newest healthy checkpoint of the run's folder that is whole has it, else the
    newest whole one, else with the weights of another run's, else new. PlanError where those are of another model.

    Every rank calls this. Moves a few small collectives over the world, and what `take_up` does.
    """
    said = list[str]()
    storage = open_storage(place_of(job, folder))
    released = None if _has_begun(storage, mesh) else released_weights_of(job)
    replica = _new(job, mesh, released)
    steps = _in_order(job, mesh, storage)
    found, is_touched = _load_first(job, mesh, replica, storage, steps, said, weights_alone=False)
    if found is not None:
        said += told_health(storage, found, max(steps, default=0))
        plan = describe_job(found.job)
        before = "" if found.job.get("plan") == job.plan.model_dump(mode="json") else f", written under {plan}"
        said.append(f"going on after step {found.step} from {storage.root}/{folder_name(found.step)}{before}")
        said += differences(found.job, job)
        if weights_from:
            said.append(f"note: the weights of --from {weights_from} are not taken: this run has begun already")
        return Resumed(replica, found.step, found.samples, found.passed_over, found.state, found, tuple(said))
    if said:  # there are some, and none is whole
        if mesh.rank == 0 and isinstance(storage, LocalStorage):
            said += put_aside(job, folder)
        said.append("beginning anew, at step 1")
        barrier(mesh.world)
    if is_touched:  # by one that was not whole
        replica = _new(job, mesh, released_weights_of(job))
    if job.model.weights:
        said.append(f"beginning with the weights of {job.model.weights}")
    if weights_from:
        other, _ = kept_by(weights_from, "train --from")
        steps = _in_order(job, mesh, other)
        found, _ = _load_first(job, mesh, replica, other, steps, said, weights_alone=True)
        if found is None:
            raise PlanError("train --from", [f"{weights_from} has no checkpoint that is whole; name a run's folder"])
        said += told_health(other, found, max(steps, default=0))
        said.append(f"beginning with the weights of {other.root}/{folder_name(found.step)}")
    return Resumed(replica, said=tuple(said))


def _has_begun(storage: Storage, mesh: Mesh) -> bool:
    """True if a checkpoint is there, as rank 0 sees it: then released weights need not be."""
    seen = torch.tensor(float(bool(steps_kept(storage))) if mesh.rank == 0 else 0.0, device=mesh.device)
    return bool(all_reduce_max(seen.reshape(1), mesh.world))


def _new(job: JobSpec, mesh: Mesh, released: ReleasedWeights | None) -> Replica:
    """This rank's part of the job at its beginning."""
    replica = build(job, mesh, initial_values(job, released))
    take_choice_biases(replica.stages, released)
    return replica


def go_back(job: JobSpec, mesh: Mesh, replica: Replica, folder: Path) -> tuple[Manifest | None, list[str]]:
    """Load the newest healthy whole checkpoint of a run that goes on. Returns what it is, None if there is none, and
    lines for the user. Every rank calls this."""
    said, storage = list[str](), open_storage(place_of(job, folder))
    steps = [step for step in _in_order(job, mesh, storage) if is_said_healthy(storage, step)]
    return _load_first(job, mesh, replica, storage, steps, said, weights_alone=False)[0], said


def newest_healthy(job: JobSpec, mesh: Mesh, folder: Path) -> int:
    """The step of the newest healthy checkpoint of a run, as rank 0 sees it; 0 where there is none. Every rank calls
    this; it moves one small all-reduce over the world."""
    storage, step = open_storage(place_of(job, folder)), 0
    if mesh.rank == 0:
        step = next((kept for kept in steps_kept(storage) if is_said_healthy(storage, kept)), 0)
    held = torch.tensor([step], dtype=torch.int64, device=mesh.device)
    return int(mesh.numbers(all_reduce_max(held, mesh.world))[0])


def doubt(job: JobSpec, folder: Path, step: int, sentence: str) -> None:
    """Rank 0's part of finding out that the weights of a checkpoint, if there is one of this step, are worth nothing:
    it says so from now on, unless it is the last that says it is healthy."""
    storage = open_storage(place_of(job, folder))
    healthy = [kept for kept in steps_kept(storage) if kept <= step and is_said_healthy(storage, kept)]
    if step in healthy and len(healthy) > 1:
        with suppress(OSError, BrokenCheckpointError):  # it stays as it was
            mark_unhealthy(storage, step, StateHealth(cause="not finite", sentence=sentence))


def _in_order(job: JobSpec, mesh: Mesh, storage: Storage) -> list[int]:
    """The steps of the checkpoints in the order in which they are tried, as rank 0 sees them; others need none."""
    steps = steps_kept(storage) if mesh.rank == 0 else []
    return in_order_to_load(storage, steps, takes_spikes=job.health.spike == "ignore")


def _load_first(
    job: JobSpec, mesh: Mesh, replica: Replica, storage: Storage, steps: list[int], said: list[str], weights_alone: bool
) -> tuple[Manifest | None, bool]:
    """Load the first of these checkpoints that is whole; the steps are rank 0's. Returns what it is, and whether the
    replica was written to at all."""
    steps = list(steps)
    is_touched = False
    while True:
        chosen = torch.tensor(steps.pop(0) if steps else -1, dtype=torch.int64, device=mesh.device)
        step = int(mesh.numbers(all_reduce_max(chosen, mesh.world).reshape(1))[0])
        if step < 0:
            return None, is_touched
        manifest, reason, is_unread, is_anew = None, "", False, False
        try:
            manifest = manifest_of(storage, step)
            refuse_other_model(manifest, job, storage, weights_alone)
            indices = indices_of(storage, manifest)
            shapes, is_touched = dict(full_shapes(indices)), True
            scaled_by = 1.0 if weights_alone else _go_on_with_scale(replica, manifest)
            is_anew = weights_alone or not has_optimizer(job, shapes)
            boxes = wanted_boxes(replica, shapes, weights_alone, scaled_by, optimizer_anew=is_anew)
            from shardwright.train.checkpoint.box_reader import load_boxes  # it takes half a second, and few load

            load_boxes(boxes, storage, folder_name(step), indices)
        except BrokenCheckpointError as error:
            reason = str(error)
        except OSError as error:
            reason, is_unread = str(error), True
        # Some ranks read more, or from a busier storage: longer than any collective may wait.
        meet(mesh.watch, mesh.rank, mesh.world.size, f"reading {folder_name(step)}")
        found = torch.tensor([float(bool(reason)), float(is_unread)], device=mesh.device)
        num_bad, num_unread = map(int, mesh.numbers(all_reduce(found, mesh.world)))
        if num_unread:  # it may be whole: an older one is no way out
            raise UnreadCheckpointError(
                f"{storage.root}/{folder_name(step)} can't be read now by {counted(num_unread, 'rank')}"
                + (f": {reason}" if is_unread else "")
                + "; mend that, and give the same command again, without --fresh"
            )
        if not num_bad and manifest is not None:
            take_up(replica, 0 if is_anew else manifest.optimizer_steps)
            if is_anew and not weights_alone and manifest.optimizer_steps:
                said.append(
                    f"note: optimizer.name {job.optimizer.name!r} begins anew, with the weights of "
                    f"{folder_name(step)}: what {optimizer_of(manifest).name!r} remembered is not what it needs"
                )
            return manifest, True
        said.append(
            f"{folder_name(step)} is not whole"
            + (f": {reason}" if reason else f", as {counted(num_bad, 'rank')} found")
            + "; an older one is taken, if there is one"
        )


def _go_on_with_scale(replica: Replica, manifest: Manifest) -> float:
    """Take up the scale of the loss. Returns it as a multiple of what it was."""
    before = manifest.state.get("loss_scale")
    if replica.loss_scale is not None and before is not None:
        replica.loss_scale.load_state_dict(before)
    now = 1.0 if replica.loss_scale is None else replica.loss_scale.value
    return now / (1.0 if before is None else float(before["value"]))
