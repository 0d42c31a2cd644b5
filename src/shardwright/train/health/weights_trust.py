"""Trust in the weights of a run: whether they are ruined, and which checkpoint a run can resume from.

A checkpoint is written before the next step computes with its weights. Weights are ruined if they give a loss or a
gradient that is not finite for two batches, even if they are finite themselves: then their checkpoint is not healthy
any more. After a single batch its data may be at fault.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardwright.config.phrase import say
from shardwright.train.build import Replica
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.manifest import folder_name
from shardwright.train.checkpoint.resuming import doubt, newest_healthy
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.health.first_not_finite import gives_no_number
from shardwright.train.train_step import StepResult


class WeightsTrust:
    """The trust in the current weights of a run. Every rank has one, and all call the same methods."""

    def __init__(self, replica: Replica, folder: Path, step: int) -> None:
        """`step` is the last step that updated the weights."""
        self._replica, self._job, self._mesh, self._folder = replica, replica.job, replica.mesh, folder
        self._changed_at = step
        # The step whose weights gave a loss or gradient that is not finite, and for how many batches in a row.
        self._bad_at, self._num_bad = -1, 0

    def see(self, results: Sequence[StepResult], first: int) -> bool:
        """Note the results of a span from step `first` on, counted from 0. Returns True if they show now that the
        weights before the span are ruined. In a pipeline that never drains, only the first result belongs to these."""
        loss, is_bad = results[0].loss, results[0].decision.cause == "not finite"
        # Huge weights may give a finite loss, even that of a random guess, and a gradient that is not finite.
        is_ruined = loss is not None and self._is_second_bad(is_bad or not math.isfinite(loss))
        for step, result in enumerate(results, first + 1):
            if not result.skipped:
                self._changed_at = step
        return is_ruined

    def loaded(self, step: int) -> None:
        """Note that the run has loaded the checkpoint of this step."""
        self._changed_at = step

    def is_ruined_by_next(self, step: int, tokens_BS: Tensor) -> bool:
        """True if another batch shows that the weights are ruined, and not the data of the last batch. Computes the
        step, counted from 0, without an update, if this is undecided. Moves the collectives of a step."""
        is_undecided = self._num_bad == 1 and self._bad_at == self._changed_at
        if not (is_undecided and self._job.checkpoint.is_on) or self._job.plan.compress != "none":
            return False
        return self._is_second_bad(gives_no_number(self._replica, step, tokens_BS))

    def doubt(self) -> None:
        """Mark the checkpoint of ruined weights as not healthy. Call it when no save is in progress."""
        if self._job.checkpoint.is_on and self._mesh.rank == 0:
            doubt(self._job, self._folder, self._bad_at, say("its weights gave no number for two batches"))

    def way_on(self) -> str:
        """The way to resume a run that has ended, as a part of a sentence. Moves a small all-reduce."""
        if not self._job.checkpoint.is_on:
            return say("no checkpoints were kept (checkpoint.every_steps keeps some)")
        step = newest_healthy(self._job, self._mesh, self._folder)
        if not step:
            return say("no checkpoint is healthy: begin anew with --fresh")
        place = f"{open_storage(place_of(self._job, self._folder)).root}/{folder_name(step)}"
        doubts = self._bad_at == step and self._num_bad > 1
        if doubts:
            return say(
                "the last healthy checkpoint is {place}, and the same command goes on from it, but its weights gave no "
                "number for two batches: --fresh begins anew",
                place=place,
            )
        return say("the last healthy checkpoint is {place}, and the same command goes on from it", place=place)

    def _is_second_bad(self, is_bad: bool) -> bool:
        """Note a batch of the current weights, `is_bad` if its loss or gradient is not finite. Returns True if it is
        the second bad batch in a row."""
        if not is_bad:
            self._bad_at, self._num_bad = -1, 0
            return False
        self._num_bad = self._num_bad + 1 if self._bad_at == self._changed_at else 1
        self._bad_at = self._changed_at
        return self._num_bad == 2
