"""The training loop of one rank on dry steps: all that `train` does around a step, without data, files and values."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.measure.checks.recorded_streams import RecordedStreams
from shardwright.schedule.job_program import steps_to_fill
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.dry_steps import DrySteps
from shardwright.train.health.run_health import RunHealth
from shardwright.train.health.weights_trust import WeightsTrust
from shardwright.train.steps_measured import StepsRecorder
from shardwright.train.trainer import train_steps
from shardwright.train.training_run import TrainingRun

_MOST_STEPS = 10**6  # the loop ends before them


def loop_job(job: JobSpec) -> JobSpec:
    """The job as its loop is recorded: with votes on saves, and a progress line at each second step, or where the
    pipeline has to drain. Comparisons, evaluations and profiles, which are rare, are left out: a dry run has no values
    to compare."""
    log_every = 2 if SCHEDULES[job.plan.schedule].drains else steps_to_fill(job.grown())
    run = {"log_every": log_every, "eval_every": 0, "profile_steps": 0}
    health = {"compare_replicas_every": 0, "repeat_every": 0}
    return job.model_copy(
        update={
            "run": job.run.model_copy(update=run),
            "health": job.health.model_copy(update=health),
            "checkpoint": CheckpointSpec(every_steps=_MOST_STEPS),
            "optimizer": job.optimizer.model_copy(update={"steps": _MOST_STEPS}),
        }
    )


class DryLoop(TrainingRun):
    """A run of dry steps that `train_steps` can move on. `waits_to_read` are the lines at which the host waited for
    measurements; other waits stay in the record of the streams. Use it in a `with` statement."""

    def __init__(self, steps: DrySteps, batches: BatchReader, streams: RecordedStreams) -> None:
        self.job, self.mesh, self.replica, self.batches = steps.replica.job, steps.mesh, steps.replica, batches
        self._files = TemporaryDirectory()
        self.folder = Path(self._files.name)
        self.health = RunHealth(self.replica, self.folder)
        self.trust = WeightsTrust(self.replica, self.folder, 0)
        self.writer = CheckpointWriter(self.job, self.replica, self.mesh, self.folder)
        self.recorder, self.log = StepsRecorder(), None
        self.done = self.samples = self.left_out = 0
        self.losses, self.unread, self.votes = [], [], ()
        self.memory_is_measured = True  # it is, once a run
        self.waits_to_read: list[str] = []
        self.streams, self._end = streams, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.batches.close()
        self._files.cleanup()

    def go_on(self, num_steps: int) -> None:
        """Run the loop for so many steps more."""
        self._end = self.done + num_steps
        train_steps(self)

    def read_measurements(self) -> None:
        other_waits = list(self.streams.waits)
        self.streams.waits.clear()
        super().read_measurements()
        self.waits_to_read += self.streams.waits
        self.streams.waits[:] = other_waits

    def save_if_due(self) -> bool:
        """Agree on saves, and save nothing: votes without values are for everything. True at the last step."""
        assert self.writer is not None
        self.writer.agree(self.done, self.votes)
        return self.done >= self._end
