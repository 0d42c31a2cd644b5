"""When a run saves, and how it does so while it goes on.

A save copies what this rank writes to host memory, which the run waits for (not on CUDA, where the copies are in the
stream before the next step), and then has two phases, on a thread each,
which it does not wait for. In the first every rank writes its files. When those of all ranks are durable, rank 0 makes
the checkpoint whole in the second: a manifest, then `latest`. The ranks agree at the end of each step, by one small
all-reduce over the world, on whether all have ended their part of a phase, whether one was asked to leave, and whether
rank 0's clock says that the next save is due.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import all_reduce, barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.checkpoint.background import BackgroundWrite
from shardwright.train.checkpoint.kept import (
    best_of_sets,
    kept_manifests,
    make_whole,
    place_of,
    remove_checkpoint,
    remove_old,
    remove_unfinished_checkpoints,
    steps_kept,
)
from shardwright.train.checkpoint.manifest import (
    HEALTHY,
    DataPlace,
    Manifest,
    MeasuredLoss,
    StateHealth,
    folder_name,
    index_file,
)
from shardwright.train.checkpoint.replica_state import coming_boxes, optimizer_steps
from shardwright.train.checkpoint.saving_cost import SavingCost
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.launch import preemption

# Seconds of training between checkpoints that lose least, where one takes so many seconds.
BestInterval = Callable[[float], float]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and durable: its step, how long the run waited for the copies (on CUDA until they were
    begun), how long after the save began all was durable, as rank 0's clock has it, and whether it is healthy."""

    step: int
    blocking_s: float
    durable_s: float
    health: StateHealth = HEALTHY


@dataclass
class _Save:
    """A save under way. `work` is what this rank does in its phase, None where it has nothing to do."""

    manifest: Manifest
    start_s: float
    blocking_s: float
    work: BackgroundWrite | None
    is_second_phase: bool = False
    has_failed: bool = False  # on some rank, in the first phase


@dataclass(frozen=True)
class Agreed:
    """The facts on which all ranks agree at the end of a step."""

    is_asked_to_leave: bool
    is_due: bool
    saved: Saved | None = None


class CheckpointWriter:
    """Saves a run's state, now and then. Every rank makes one, and calls each method, in the same order."""

    def __init__(
        self, job: JobSpec, replica: Replica, mesh: Mesh, folder: Path, best_interval_s: BestInterval | None = None
    ) -> None:
        from shardwright.train.checkpoint.box_writer import save_boxes  # it takes half a second, not in the first save

        self._job, self._replica, self._mesh, self._save_boxes = job, replica, mesh, save_boxes
        self._storage = open_storage(place_of(job, folder))
        self._best_interval_s = best_interval_s
        self._current: _Save | None = None
        self._blocking_s = 0.0
        self._cost = SavingCost()
        self._last_s = time.monotonic()
        self._is_occupied = False  # the folder of the step that the run has come to, by a checkpoint
        self._there = set[int]()  # steps that have one, as rank 0 knows
        self._manifests = dict[int, Manifest]()  # of these, on rank 0 once the best is asked for
        if mesh.rank == 0:
            remove_unfinished_checkpoints(self._storage)
            self._there.update(steps_kept(self._storage))
        barrier(mesh.world)  # nobody writes before

    def agree(self, step: int) -> Agreed:
        """The end of a step. Moves one small all-reduce over the world."""
        self._cost.step_ends(time.monotonic(), was_saving=self._current is not None)
        due = self._mesh.rank == 0 and self._clock_says_due()
        saved, (asked, is_due, is_there) = self._poll(preemption.is_asked(), due, step in self._there)
        self._is_occupied = is_there > 0
        every = self._job.checkpoint.every_steps
        return Agreed(asked > 0, is_due > 0 or bool(every and step % every == 0), saved)

    def save(
        self, step: int, samples: int, passed_over: int, state: dict[str, Any], health: StateHealth = HEALTHY,
        data: DataPlace | None = None, losses: Mapping[str, MeasuredLoss] = MappingProxyType({}),
    ) -> Saved | None:  # fmt: skip
        """Begin to save what there is after so many steps, with the run at `samples` of the `data`, of which it passed
        some over, the `state` of who watches over it, how healthy all that is, and the `losses` on sets. A save still
        being written is waited for, and returned."""
        before = self.wait()
        start_s = time.monotonic()
        self._make_room(step)
        job, replica, mesh, storage = self._job, self._replica, self._mesh, self._storage
        if replica.loss_scale is not None:
            state = state | {"loss_scale": replica.loss_scale.state_dict()}
        manifest = Manifest(
            step=step, samples=samples, passed_over=passed_over, optimizer_steps=optimizer_steps(replica),
            job=job.model_dump(mode="json"), state=state, health=health, data=data,
            losses=dict(losses), files=(),
        )  # fmt: skip
        coming = coming_boxes(replica, mesh)
        self._last_s = time.monotonic()
        self._blocking_s = self._last_s - start_s

        def write() -> None:
            boxes = coming.wait()
            self._save_boxes(boxes, storage, folder_name(step), mesh.rank)
            boxes.clear()

        work = BackgroundWrite(write, f"checkpoint of step {step}")
        self._current = _Save(manifest, start_s, self._blocking_s, work)
        return before

    def _make_room(self, step: int) -> None:
        """Remove a checkpoint that the run went on without, from an older one, and has come to again: else its manifest
        would speak of files that are written over. Moves a barrier where there is one."""
        if self._is_occupied:
            if self._mesh.rank == 0:
                remove_checkpoint(self._storage, folder_name(step))
            barrier(self._mesh.world)
        self._is_occupied = False
        self._there.add(step)

    def wait(self) -> Saved | None:
        """Block until what is being saved is whole, which is returned, or has failed. Moves small all-reduces over the
        world, each in less than the time that a rank may wait for another."""
        saved, told_s = None, time.monotonic()
        while self._current is not None:
            if self._current.work is not None:
                self._current.work.wait(self._job.run.timeout_s / 4)
            step = self._current.manifest.step
            saved, _ = self._poll()
            if self._mesh.rank == 0 and time.monotonic() - told_s > self._job.run.timeout_s:
                print(f"waiting for the checkpoint of step {step}, which is still being written", flush=True)
                told_s = time.monotonic()
        return saved

    def _poll(self, *votes: bool) -> tuple[Saved | None, list[float]]:
        """Go on to the next phase where all ranks have ended this one. Returns what is whole now, and how many ranks
        vote for each. Moves one small all-reduce over the world."""
        save = self._current
        is_over = save is None or save.work is None or save.work.is_over()
        error = save.work.error if save is not None and save.work is not None and is_over else None
        mine = torch.tensor([is_over, error is not None, *votes], dtype=torch.float64, device=self._mesh.device)
        num_over, num_failed, *counts = self._mesh.numbers(all_reduce(mine, self._mesh.world))
        saved = None
        if save is not None and num_over == self._mesh.world.size:
            if error is not None:
                self._tell_failed(save.manifest.step, error)
            if save.is_second_phase:
                self._current = None
                if not save.has_failed and not num_failed:
                    ended_s = save.work.ended_s if save.work is not None else time.monotonic()
                    saved = Saved(save.manifest.step, save.blocking_s, ended_s - save.start_s, save.manifest.health)
            else:
                self._begin_second_phase(save, num_failed > 0)
        return saved, counts

    def _begin_second_phase(self, save: _Save, has_failed: bool) -> None:
        """The files of all ranks are there: rank 0 makes the checkpoint whole. Or some are not: it removes the rest."""
        save.is_second_phase, save.has_failed, save.work = True, has_failed, None
        if self._mesh.rank > 0:
            return
        manifest, storage = save.manifest, self._storage
        files = [index_file(rank) for rank in range(self._mesh.world.size)]

        def finish() -> None:
            try:
                if not has_failed:
                    make_whole(storage, manifest, files)
            except Exception:
                remove_checkpoint(storage, folder_name(manifest.step))
                raise
            if has_failed:
                remove_checkpoint(storage, folder_name(manifest.step))
                return
            with suppress(Exception):  # what can't be removed takes room, and harms nobody
                remove_old(storage, self._job.checkpoint, manifest.step, self._best(manifest))

        save.work = BackgroundWrite(finish, f"manifest of step {manifest.step}")

    def _best(self, newest: Manifest) -> list[int]:
        """The checkpoints up to the newest with the least loss on a set that runs keep the best by; on rank 0."""
        if not self._manifests:
            self._manifests = kept_manifests(self._storage)
        self._manifests[newest.step] = newest
        there = [step for step in steps_kept(self._storage) if step <= newest.step]
        return best_of_sets({step: self._manifests[step] for step in there if step in self._manifests})

    def _tell_failed(self, step: int, error: Exception) -> None:
        print(
            f"rank {self._mesh.rank}: the checkpoint of step {step} could not be written: {error}; the run goes on, "
            "and what was saved before stays", file=sys.stderr, flush=True,
        )  # fmt: skip

    def _clock_says_due(self) -> bool:
        spec, passed_s = self._job.checkpoint, time.monotonic() - self._last_s
        every_s = [spec.every_s] if spec.every_s else []
        if spec.auto and self._best_interval_s is not None:
            cost_s = self._cost.seconds()
            if cost_s is not None:
                every_s.append(self._best_interval_s(max(cost_s, self._blocking_s)))
            elif self._cost.knows_steps() and not self._blocking_s:
                every_s.append(0.0)  # the first one shows what one costs
        return bool(every_s) and passed_s >= min(every_s)
