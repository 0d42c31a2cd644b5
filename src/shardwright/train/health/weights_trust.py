"""True if the weights that a run has are worth going on from, and from which checkpoint to go on.

A checkpoint is written before anybody has computed with its weights. Those that give a loss which is no number for two
batches are ruined, although they may be numbers themselves: their checkpoint is no longer healthy. One batch alone may
be the fault of its data.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.manifest import folder_name
from shardwright.train.checkpoint.resuming import doubt, newest_healthy
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.health.first_not_finite import gives_no_number
from shardwright.train.train_step import StepResult


class WeightsTrust:
    """The trust in the weights that a run has now. All ranks make one and call the same methods."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, step: int) -> None:
        """`step` is the one after which the weights were changed last."""
        self._job, self._mesh, self._folder = job, mesh, folder
        self._changed_at = step
        # Batches in a row for which the weights of a step gave a loss or a gradient that is no number.
        self._bad_at, self._num_bad = -1, 0

    def see(self, results: Sequence[StepResult], first: int) -> bool:
        """A span from step `first` on, counted from 0, has these results. Where the pipeline never drains, the first of
        them alone is of the weights that there were. Returns whether these are ruined, as is known since now."""
        loss, is_bad = results[0].loss, results[0].decision.cause == "not finite"
        # Huge weights may give a loss, even the one of chance, and a gradient that is no number.
        is_ruined = loss is not None and self._is_second_bad(is_bad or not math.isfinite(loss))
        for step, result in enumerate(results, first + 1):
            if not result.skipped:
                self._changed_at = step
        return is_ruined

    def loaded(self, step: int) -> None:
        """The run has gone back to the checkpoint of this step."""
        self._changed_at = step

    def is_ruined_by_next(self, replica: Replica, step: int, tokens_BS: Tensor) -> bool:
        """Compute a step, counted from 0, if that tells whether the weights or the last batch were at fault. Moves what
        a step moves."""
        is_open = self._num_bad == 1 and self._bad_at == self._changed_at
        if not (is_open and self._job.checkpoint.is_on) or self._job.plan.compress != "none":
            return False
        return self._is_second_bad(gives_no_number(self._job, replica, self._mesh, step, tokens_BS))

    def doubt(self) -> None:
        """Have the checkpoint of ruined weights say so. What is being written must be there."""
        if self._job.checkpoint.is_on and self._mesh.rank == 0:
            doubt(self._job, self._folder, self._bad_at, "its weights gave no number for two batches")

    def way_on(self) -> str:
        """The checkpoint that a run which has ended goes on from, as a part of a sentence. Moves a small all-reduce."""
        if not self._job.checkpoint.is_on:
            return "no checkpoints were kept (checkpoint.every_steps keeps some)"
        step = newest_healthy(self._job, self._mesh, self._folder)
        if not step:
            return "no checkpoint is healthy: begin anew with --fresh"
        place = f"{open_storage(place_of(self._job, self._folder)).root}/{folder_name(step)}"
        doubts = self._bad_at == step and self._num_bad > 1
        return f"the last healthy checkpoint is {place}, and the same command goes on from it" + (
            ", but its weights gave no number for two batches: --fresh begins anew" if doubts else ""
        )

    def _is_second_bad(self, is_bad: bool) -> bool:
        """The weights that there are gave a loss or a gradient that `is_bad`: no number. Returns whether it is the
        second batch in a row."""
        if not is_bad:
            self._bad_at, self._num_bad = -1, 0
            return False
        self._num_bad = self._num_bad + 1 if self._bad_at == self._changed_at else 1
        self._bad_at = self._changed_at
        return self._num_bad == 2
