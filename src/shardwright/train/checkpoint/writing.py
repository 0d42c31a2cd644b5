"""Asynchronous saves of a run's state, and the rule for when a save is due.

A save first copies this rank's boxes to host memory. The run waits for the copies, but not on CUDA, where the stream
has them before the next step. Then two phases follow in background threads, and training goes on meanwhile. In the
first phase every rank writes its files. When the files of all ranks are durable, rank 0 commits the checkpoint in the
second phase: it writes the manifest, then `latest`. Before the update of each step, one small all-reduce over the
world tells the ranks if all have ended their part of a phase, if a rank is asked to leave, and if rank 0's clock says
that the next save is due. The host reads it together with the numbers of the step, and acts on it at the end of the
step.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.config.base import error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import in_language, language_of_locale, say
from shardwright.parallel.comm.collectives import all_reduce, barrier
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.checkpoint.base_weights import base_digest
from shardwright.train.checkpoint.boxes import save_boxes
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
)
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.saving_cost import SavingCost
from shardwright.train.checkpoint.state_part import optimizer_steps
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.launch import preemption

# A function from the seconds that a save takes to the seconds between saves that lose the least training time.
BestInterval = Callable[[float], float]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint: its step, how long the run waited for the copies (on CUDA, until they were queued), the
    time from the start of the save until all files were durable, by rank 0's clock, and the health of its state."""

    step: int
    blocking_s: float
    durable_s: float
    health: StateHealth = HEALTHY


@dataclass(frozen=True)
class StateQuality:
    """The quality of a saved state: its health, and its validation losses by the name of the set."""

    health: StateHealth = HEALTHY
    losses: Mapping[str, MeasuredLoss] = field(default_factory=dict)


HEALTHY_STATE = StateQuality()


class BackgroundWrite:
    """A write on a thread of its own while the run trains, with its error and its end time."""

    def __init__(self, write: Callable[[], None], name: str) -> None:
        self._write = write
        self._error: Exception | None = None
        self.ended_s = 0.0  # time.monotonic() at the end of the write
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error
        self.ended_s = time.monotonic()

    def is_over(self) -> bool:
        """True if the write has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the write has ended, or for `timeout_s`. Returns True if it has ended."""
        self._thread.join(timeout_s)
        return self.is_over()

    @property
    def error(self) -> Exception | None:
        """The exception of a failed write, None if it has not failed."""
        return self._error


@dataclass
class _Save:
    """A save in progress. `work` is this rank's work in the current phase, None if it has none."""

    manifest: Manifest
    start_s: float
    blocking_s: float
    work: BackgroundWrite | None
    is_second_phase: bool = False
    has_failed: bool = False  # on some rank, in the first phase


@dataclass(frozen=True)
class Agreed:
    """The facts that all ranks know after the all-reduce at the end of a step."""

    is_asked_to_leave: bool
    is_due: bool
    saved: Saved | None = None


class CheckpointWriter:
    """Saves a run's state in the background. Every rank has a writer, and all ranks call its methods in one order."""

    def __init__(
        self, job: JobSpec, replica: Replica, mesh: Mesh, folder: Path, best_interval_s: BestInterval | None = None
    ) -> None:
        self._job, self._replica, self._mesh = job, replica, mesh
        # The votes are the run's, and not the step's in which they travel: its account does not have them.
        votes_ledger = Ledger(mesh.device, mesh.rank, kind=mesh.ledger.kind, streams=mesh.streams)
        self._votes_axis = replace(mesh.world, ledger=votes_ledger)
        self._saved_state = SavedState(replica, mesh)
        self._storage, self._base = open_storage(place_of(job, folder)), base_digest(job)
        self._best_interval_s = best_interval_s
        self._current: _Save | None = None
        self._blocking_s = 0.0
        self._cost = SavingCost()
        self._last_s = time.monotonic()
        self._is_occupied = False  # True if a checkpoint of the run's current step exists already
        self._saved_steps = set[int]()  # steps that have a checkpoint; complete on rank 0 only
        self._manifests = dict[int, Manifest]()  # their manifests, read on rank 0 when the best is first looked for
        if mesh.rank == 0:
            remove_unfinished_checkpoints(self._storage)
            self._saved_steps.update(steps_kept(self._storage))
        barrier(mesh.world)  # no rank writes before rank 0 has cleaned up

    def vote(self, step: int) -> Tensor:
        """Vote before the update of a step, after which `step` steps are done. Returns the votes of all ranks, on the
        device, for `agree`. Moves one small all-reduce over the world, which is not in the account of the step."""
        self._cost.step_ends(time.monotonic(), was_saving=self._current is not None)
        is_due = self._mesh.rank == 0 and self._clock_says_due()
        return self._sum_votes(preemption.is_asked(), is_due, step in self._saved_steps)

    def agree(self, step: int, votes: Sequence[float] = ()) -> Agreed:
        """End a step: tell all ranks if they are asked to leave, if a save is due, and which one has been committed.
        `votes` are the numbers that `vote` gave for this step; without them all ranks vote now."""
        votes = votes or self._mesh.numbers(self.vote(step))
        num_over, num_failed, num_asked, num_due, num_saved = votes
        saved = self._go_on(num_over, num_failed)
        self._is_occupied = num_saved > 0
        every_steps = self._job.checkpoint.every_steps
        return Agreed(num_asked > 0, num_due > 0 or bool(every_steps and step % every_steps == 0), saved)

    def save(
        self,
        step: int,
        samples: int,
        passed_over: int,
        state: dict[str, Any],
        quality: StateQuality = HEALTHY_STATE,
        data: DataPlace | None = None,
    ) -> Saved | None:
        """Begin to save the run after `step` steps. `state` is the state that is no tensor, without the loss scale; the
        other arguments are those of a Manifest. Waits for a save that is still in progress, and returns that one."""
        previous = self.wait()
        start_s = time.monotonic()
        self._make_room(step)
        manifest = Manifest(
            step=step,
            samples=samples,
            passed_over=passed_over,
            optimizer_steps=optimizer_steps(self._replica),
            job=self._job.model_dump(mode="json"),
            state=state | self._saved_state.numbers(),
            health=quality.health,
            data=data,
            losses=dict(quality.losses),
            base=self._base,
            files=(),
        )
        copies = self._saved_state.copy()
        self._last_s = time.monotonic()
        self._blocking_s = self._last_s - start_s

        def write() -> None:
            boxes = copies.wait()
            save_boxes(boxes, self._storage, folder_name(step), self._mesh.rank)
            boxes.clear()

        work = BackgroundWrite(write, say("checkpoint of step {step}", step=step))
        self._current = _Save(manifest, start_s, self._blocking_s, work)
        return previous

    def _make_room(self, step: int) -> None:
        """Remove an older checkpoint of this step, which exists if the run resumed from before it: else its manifest
        would name files that are overwritten. Moves a barrier if it exists."""
        if self._is_occupied:
            if self._mesh.rank == 0:
                remove_checkpoint(self._storage, folder_name(step))
            barrier(self._mesh.world)
        self._is_occupied = False
        self._saved_steps.add(step)

    def wait(self) -> Saved | None:
        """Block until the save in progress is committed, and return it, or has failed. Moves small all-reduces over the
        world, each within the time that a rank may wait for another."""
        saved, last_message_s = None, time.monotonic()
        while self._current is not None:
            if self._current.work is not None:
                self._current.work.wait(self._job.run.timeout_s / 4)
            step = self._current.manifest.step
            saved = self._go_on(*self._mesh.numbers(self._sum_votes()))
            if self._mesh.rank == 0 and time.monotonic() - last_message_s > self._job.run.timeout_s:
                waiting = say("waiting for the checkpoint of step {step}, which is still being written", step=step)
                print(in_language(waiting, language_of_locale()), flush=True)
                last_message_s = time.monotonic()
        return saved

    def _sum_votes(self, *votes: bool) -> Tensor:
        """The number of ranks whose work in the current phase is over, of those where it has failed, and of those that
        vote True for each vote; on the device. Moves one small all-reduce over the world."""
        save = self._current
        is_over = save is None or save.work is None or save.work.is_over()
        has_failed = save is not None and save.work is not None and is_over and save.work.error is not None
        self._votes_axis.ledger.clear()
        flags = torch.tensor([is_over, has_failed, *votes], dtype=torch.float64, device=self._mesh.device)
        return all_reduce(flags, self._votes_axis)

    def _go_on(self, num_over: float, num_failed: float) -> Saved | None:
        """Go on to the next phase if all ranks have ended the current one, as they voted. Returns the save if it is
        committed now."""
        save = self._current
        if save is None or num_over < self._mesh.world.size:
            return None
        if save.work is not None and save.work.error is not None:
            self._tell_failed(save.manifest.step, save.work.error)
        if not save.is_second_phase:
            self._begin_second_phase(save, num_failed > 0)
            return None
        self._current = None
        if save.has_failed or num_failed:
            return None
        ended_s = save.work.ended_s if save.work is not None else time.monotonic()
        return Saved(save.manifest.step, save.blocking_s, ended_s - save.start_s, save.manifest.health)

    def _begin_second_phase(self, save: _Save, has_failed: bool) -> None:
        """Let rank 0 commit the checkpoint if all ranks have written their files, or remove the files if one has
        failed."""
        save.is_second_phase, save.has_failed, save.work = True, has_failed, None
        if self._mesh.rank > 0:
            return
        manifest, storage = save.manifest, self._storage

        def finish() -> None:
            try:
                if not has_failed:
                    make_whole(storage, manifest, self._mesh.world.size)
            except Exception:
                remove_checkpoint(storage, folder_name(manifest.step))
                raise
            if has_failed:
                remove_checkpoint(storage, folder_name(manifest.step))
                return
            with suppress(Exception):  # a file that can't be removed takes space, but does no harm
                remove_old(storage, self._job.checkpoint, manifest.step, self._best(manifest))

        save.work = BackgroundWrite(finish, say("manifest of step {step}", step=manifest.step))

    def _best(self, newest: Manifest) -> list[int]:
        """The steps of the best checkpoints up to the newest one (`best_of_sets`); on rank 0 only."""
        if not self._manifests:
            self._manifests = kept_manifests(self._storage)
        self._manifests[newest.step] = newest
        steps = [step for step in steps_kept(self._storage) if step <= newest.step]
        return best_of_sets({step: self._manifests[step] for step in steps if step in self._manifests})

    def _tell_failed(self, step: int, error: Exception) -> None:
        warning = say(
            "rank {rank}: the checkpoint of step {step} could not be written: {reason}; the run goes on, and what was "
            "saved before stays",
            rank=self._mesh.rank,
            step=step,
            reason=error_text(error),
        )
        print(in_language(warning, language_of_locale()), file=sys.stderr, flush=True)

    def _clock_says_due(self) -> bool:
        spec, elapsed_s = self._job.checkpoint, time.monotonic() - self._last_s
        intervals_s = [spec.every_s] if spec.every_s else []
        if spec.auto and self._best_interval_s is not None:
            cost_s = self._cost.seconds()
            if cost_s is not None:
                intervals_s.append(self._best_interval_s(max(cost_s, self._blocking_s)))
            elif self._cost.knows_steps() and not self._blocking_s:
                intervals_s.append(0.0)  # save at once: the first save measures the cost of one
        return bool(intervals_s) and elapsed_s >= min(intervals_s)
