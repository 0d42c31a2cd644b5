"""When a run saves, and how it does so while it goes on.

A save copies what this rank writes to host memory, which the run waits for, and writes it on a thread, which it does
not wait for. When the files of all ranks are durable, rank 0 makes the checkpoint whole: a manifest, then `latest`. The
ranks agree at the end of each step, by one small all-reduce over the world, on whether all have written, whether one
was asked to leave, and whether rank 0's clock says that the next save is due.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.checkpoint.background import BackgroundWrite
from shardwright.train.checkpoint.box_files import save_boxes
from shardwright.train.checkpoint.kept import (
    make_whole,
    place_of,
    remove_checkpoint,
    remove_old,
    remove_unfinished_checkpoints,
)
from shardwright.train.checkpoint.manifest import Manifest, folder_name, index_file
from shardwright.train.checkpoint.replica_state import held_boxes, optimizer_steps
from shardwright.train.checkpoint.saving_cost import SavingCost
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.launch import preemption

# Seconds of training between checkpoints that lose least, where one takes so many seconds.
BestInterval = Callable[[float], float]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable: its step, how long the run waited for it, how long the writing took on the slowest
    rank, and its bytes."""

    step: int
    blocking_s: float
    writing_s: float


@dataclass(frozen=True)
class Agreed:
    """What all ranks know at the end of a step."""

    is_asked_to_leave: bool
    is_due: bool
    saved: Saved | None = None


class CheckpointWriter:
    """Saves a run's state, now and then. Every rank calls each method, in the same order."""

    def __init__(
        self, job: JobSpec, replica: Replica, mesh: Mesh, folder: Path, best_interval_s: BestInterval | None = None
    ) -> None:
        self._job, self._replica, self._mesh = job, replica, mesh
        self._storage = open_storage(place_of(job, folder))
        self._best_interval_s = best_interval_s
        self._write: BackgroundWrite | None = None
        self._whole: BackgroundWrite | None = None
        self._manifest: Manifest | None = None
        self._blocking_s = 0.0
        self._cost = SavingCost()
        self._last_s = time.monotonic()
        if mesh.rank == 0:
            remove_unfinished_checkpoints(self._storage)

    def agree(self, step: int) -> Agreed:
        """The end of a step. Moves one small all-reduce over the world."""
        write = self._write
        if step:
            self._cost.step_ends(time.monotonic(), was_saving=write is not None)
        is_over = write is None or write.is_over()
        failed = write is not None and is_over and write.error is not None
        took_s = write.seconds if write is not None and is_over else 0.0
        due = self._mesh.rank == 0 and self._clock_says_due()
        votes = [is_over, failed, preemption.is_asked(), due, took_s]
        over, num_failed, asked, due_sum, sum_s = self._sum([float(vote) for vote in votes])
        saved = None
        if write is not None and over == self._mesh.world.size:
            saved = self._finish(num_failed > 0, sum_s / self._mesh.world.size)
        every = self._job.checkpoint.every_steps
        return Agreed(asked > 0, due_sum > 0 or bool(every and step % every == 0), saved)

    def save(self, step: int, samples: int, passed_over: int, state: dict[str, Any]) -> Saved | None:
        """Begin to save what there is after so many steps, and the `state` of who watches over the run. A save that is
        still being written is waited for first, and returned."""
        before = self.wait()
        start_s = time.perf_counter()
        job, replica, mesh, storage = self._job, self._replica, self._mesh, self._storage
        if replica.loss_scale is not None:
            state = state | {"loss_scale": replica.loss_scale.state_dict()}
        self._manifest = Manifest(
            step=step, samples=samples, passed_over=passed_over, optimizer_steps=optimizer_steps(replica),
            job=job.model_dump(mode="json"), state=state, files=(),
        )  # fmt: skip
        boxes = held_boxes(replica, mesh)
        copied = None
        if mesh.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._last_s = time.monotonic()
        self._blocking_s = time.perf_counter() - start_s

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            save_boxes(boxes, storage, folder_name(step), mesh.rank)
            boxes.clear()

        self._write = BackgroundWrite(write, f"checkpoint of step {step}")
        return before

    def wait(self) -> Saved | None:
        """Block until what is being saved is durable on all ranks, and whole. Moves small all-reduces over the world,
        each in less than the time that a rank may wait for another."""
        saved = None
        while self._write is not None:
            self._write.wait(self._job.run.timeout_s / 4)
            saved = self.agree(0).saved
        while self._sum([float(self._whole is None or self._whole.wait(self._job.run.timeout_s / 4))])[0] < (
            self._mesh.world.size
        ):
            pass
        return saved

    def _sum(self, numbers: list[float]) -> list[float]:
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._mesh.device)
        found: list[float] = all_reduce(mine, self._mesh.world).tolist()
        return found

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

    def _finish(self, has_failed: bool, writing_s: float) -> Saved | None:
        """All ranks have ended writing."""
        write, manifest, storage = self._write, self._manifest, self._storage
        assert write is not None and manifest is not None
        self._write = None
        if write.error is not None:
            print(
                f"rank {self._mesh.rank}: the checkpoint of step {manifest.step} could not be written: {write.error}; "
                "the run goes on, and what was saved before stays", file=sys.stderr, flush=True,
            )  # fmt: skip
        if self._mesh.rank == 0:
            files = [index_file(rank) for rank in range(self._mesh.world.size)]

            def finish() -> None:
                if has_failed:
                    remove_checkpoint(storage, folder_name(manifest.step))
                    return
                make_whole(storage, manifest, files)
                remove_old(storage, self._job.checkpoint)

            self._whole = BackgroundWrite(finish, f"manifest of step {manifest.step}")
        return None if has_failed else Saved(manifest.step, self._blocking_s, writing_s)
