"""The state of one rank's training run, and the parts of its loop (trainer.py), each of which moves the state on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardwright.config.base import PassingError, RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import each, say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import counted_phrase
from shardwright.parallel.comm.hang_watch import in_turn_of_rank_0
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.pipeline.action_times import Performed
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth, folder_name
from shardwright.train.checkpoint.resuming import Resumed, begin, go_back
from shardwright.train.checkpoint.writing import BestInterval, CheckpointWriter, Saved, StateQuality
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.data.place import PlaceInData, StoredPlace, taken_up
from shardwright.train.data.prepare import prepare_tokens, prepare_validation, refuse_missing
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.progress import tell_aside
from shardwright.train.data.source_files import trained_on_notes
from shardwright.train.health.run_health import RunHealth, ran_compute
from shardwright.train.health.weights_trust import WeightsTrust
from shardwright.train.held_out import HeldOutSets
from shardwright.train.metrics import MetricsLog
from shardwright.train.run_lines import NOTHING_IS_KEPT, introduce, rate_note
from shardwright.train.span import SpanRun, SpanStart, end_of_span, read_spans, samples_of, tell_span, watched_span
from shardwright.train.step_metrics import device_title
from shardwright.train.steps_measured import StepsRecorder, measure_memory, predicted_lines

MOST_UNREAD_STEPS = 10  # whose measurements lie on a device: to read them, the host waits


@dataclass(frozen=True)
class RunStart:
    """The start of a run, beside what its job says. `predicted` is the memory of each pipeline rank; `weights_from` is
    a folder or address, whose newest checkpoint gives a new run its weights; `best_interval_s` gives the seconds
    between checkpoints from the seconds that one takes."""

    predicted: Sequence[RankMemory] = ()
    weights_from: str = ""
    best_interval_s: BestInterval | None = None


class SaveFailedError(PassingError):
    """The state that a run ends with could not be saved."""


class TrainingRun:
    """One rank's run: its part of the model, its place in the data, and its health. All ranks make one and call the
    same methods in the same order."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, start: RunStart) -> None:
        """Resume from the newest whole checkpoint of the folder, or begin."""
        self.job, self.mesh, self.folder, self.predicted = job, mesh, folder, start.predicted
        self.tokens, validation_sets = _prepare_data(job, mesh, folder)
        self.held_out = HeldOutSets(job, self.tokens, validation_sets)
        begun = begin(job, mesh, folder, start.weights_from)
        self.place, place_lines = _place_in_data(job, folder, begun, PlaceInData.at_beginning(self.tokens, job))
        self.batches = BatchReader(self.place.train_samples(), job, mesh, job.optimizer.steps)
        self.replica = begun.replica
        self.done = self.saved_step = begun.step  # steps
        self.samples = begun.samples  # before the next step, with those that were passed over
        self.passed_over = begun.passed_over
        self.trust = WeightsTrust(begun.replica, folder, begun.step)
        self.losses: list[float] = []
        self.unread: list[SpanRun] = []  # spans whose measurements were not read yet
        self.memory_is_measured = False
        self.votes: tuple[float, ...] = ()  # of all ranks on saves, as cast in the last step
        self.health = RunHealth(begun.replica, folder, begun.step + 1)
        self._restore(begun.state, HEALTHY if begun.manifest is None else begun.manifest.health)
        self.writer: CheckpointWriter | None = None
        if job.checkpoint.is_on:
            self.writer = CheckpointWriter(job, self.replica, mesh, folder, start.best_interval_s)
        self.log = MetricsLog(job, mesh, folder, begun.step) if mesh.rank == 0 else None
        self.recorder = StepsRecorder(self.log.device_name if self.log is not None else "")
        self.performed: list[Performed] = []  # the actions of this rank in the last step that was read, with times
        if self.log is not None:
            digests = dict(zip(self.place.names, self.place.digests, strict=True))
            self.log.begin(begun.step, device_title(mesh.device), digests)
            introduce(job, mesh, self.tokens, self.place, self.log)
            self.tell([*predicted_lines(start.predicted), *begun.lines, *place_lines, self.health.startup_message])
            self.tell([*self.held_out.notes(), *trained_on_notes(job.data)])
            self.tell([rate_note(begun.manifest, job, self.left_out)] if begun.manifest is not None else [])
            self.tell([] if job.checkpoint.is_on else [NOTHING_IS_KEPT])
            if self.done >= job.optimizer.steps:
                self.tell(
                    [
                        say(
                            "nothing is left to do: {done} of {steps} are done",
                            done=self.done,
                            steps=counted_phrase(job.optimizer.steps, "step"),
                        )
                    ]
                )

    def train_span(self) -> SpanRun:
        """The steps up to the next moment at which the pipeline drains: forward, backward and update. RunError if the
        loss scale of fp16 can't go lower."""
        end = end_of_span(self.replica, self.done)
        start = SpanStart(self.done, end - self.done, self.samples, self.left_out)
        votes = partial(self.writer.vote, end) if self.writer is not None else None
        try:
            span = watched_span(self.replica, start, self.batches, self.health, votes)
        except FloatingPointError as error:
            self._wait_for_save()
            raise RunError(say("{fault}; {way_on}", fault=error_text(error), way_on=self.trust.way_on())) from None
        if self.trust.see(span.results, self.done):
            self._wait_for_save()
            self.trust.doubt()
        return span

    def stop(self, span: SpanRun) -> NoReturn:
        """End the run because of a span: RunError. The batch behind it tells if the weights were at fault."""
        self.read_measurements()
        self.tell(span.lines)
        self._wait_for_save()
        if self.replica.program.weights == "current" and self.done + 1 < self.job.optimizer.steps:
            next_BS = self.batches.batch(self.done + 1, self.samples + self._num_samples(span))
            if self.trust.is_ruined_by_next(self.done + 1, next_BS):
                self.trust.doubt()
        raise RunError(each([span.decision.sentence, self.trust.way_on()]))

    def rewind(self, span: SpanRun) -> None:
        """Go back to the last healthy checkpoint, and go on with the data behind those of a span that went wrong.
        RunError if there is no such checkpoint."""
        decision = span.decision
        self.read_measurements()
        self.tell(span.lines)
        self._wait_for_save()
        assert self.writer is not None, "the job was refused: it goes back to checkpoints that it does not write"
        healthy, lines = go_back(self.job, self.mesh, self.replica, self.folder)
        self.tell(lines)
        if healthy is None:
            raise RunError(
                say(
                    "{sentence}; there is no healthy checkpoint to go back to: save more often "
                    "(checkpoint.every_steps), lower optimizer.learning_rate or raise optimizer.warmup_steps",
                    sentence=decision.sentence,
                )
            )
        self.samples += self._num_samples(span)
        self.passed_over = healthy.passed_over + self.samples - healthy.samples
        self.done = healthy.step
        self.trust.loaded(healthy.step)
        self._restore(healthy.state, healthy.health)
        self.health.judge.rewound(decision.step)
        if self.log is not None:
            self.log.go_back(healthy.step)
        self.tell(
            [
                say(
                    "{sentence}; going on after step {step}, with the data behind these steps",
                    sentence=decision.sentence,
                    step=healthy.step,
                )
            ]
        )

    def count(self, span: SpanRun) -> None:
        """Count the steps and samples of a span."""
        self.samples += self._num_samples(span)
        self.done += len(span.results)
        self.left_out += sum(result.skipped for result in span.results)
        self.losses += [result.loss for result in span.results if result.loss is not None]
        self.votes = span.results[-1].votes
        self.unread.append(span)

    def read_measurements_if_due(self) -> None:
        """Read the measurements of spans at each progress line, and every MOST_UNREAD_STEPS; on a CPU, where nothing
        waits, after each span. The actions of the last step and their times are read with them."""
        num_unread = sum(len(span.results) for span in self.unread)
        is_due = self.mesh.streams is None or num_unread >= MOST_UNREAD_STEPS
        if is_due or self.health.is_log_step(self.done):
            self.read_measurements()
            self.performed = self.replica.executor.performed

    def read_measurements(self) -> None:
        """Read the measurements of all spans that were counted since the last reading, and log their steps."""
        spans, self.unread = self.unread, []
        if not spans:
            return
        drains = SCHEDULES[self.job.plan.schedule].drains
        measured_spans = read_spans(self.mesh, spans)
        typical = [measured for measured in measured_spans if ran_compute(measured.span.results, drains)]
        for measured in typical:
            self.recorder.add(measured.use, measured.shares.peak_memory_bytes)
        compute_s = [measured.use.step_s - sum(measured.use.blocked_s.values()) for measured in typical]
        slow_lines = self.health.check_stragglers(self.done, compute_s)
        if self.log is not None:
            for measured in measured_spans:
                tell_span(measured, slow_lines if measured is measured_spans[-1] else (), self.health, self.log)

    def measure_memory_once(self, span: SpanRun) -> None:
        """Measure the memory of all ranks after the first update: from then on the optimizer has its state."""
        if self.memory_is_measured or all(result.skipped for result in span.results):
            return
        self.memory_is_measured = True
        self.read_measurements()
        measured = measure_memory(self.replica)
        self.recorder.memory = measured[self.mesh.pp.index]
        if self.log is not None:
            self.log.memory(self.predicted, measured)

    def evaluate_if_due(self) -> None:
        """Measure the losses on held-out text at the end, and every run.eval_every steps."""
        every = self.job.run.eval_every
        if self.done == self.job.optimizer.steps or (every and self.done % every == 0):
            self.read_measurements()
            self._measure_losses(self.held_out.readers)

    def save_if_due(self) -> bool:
        """Begin a checkpoint at the end, when one is due, or when the run is asked to leave. Returns True if it is
        asked to leave; the checkpoint is whole then."""
        if self.writer is None:
            return False
        agreed = self.writer.agree(self.done, self.votes)
        self._log_saved(agreed.saved)
        is_last = self.done == self.job.optimizer.steps
        best = self.job.checkpoint.keep_best
        if best and (agreed.is_due or is_last) and not agreed.is_asked_to_leave and not self._has_measured(best):
            self._measure_losses([best])
            if self.held_out.losses[best] is None:
                self.tell(
                    [
                        say(
                            "note: checkpoint.keep_best = {best} keeps nothing: no token of that set has a loss",
                            best=repr(best),
                        )
                    ]
                )
        if agreed.is_due or agreed.is_asked_to_leave or is_last:
            self.read_measurements()  # of steps that a run which goes on from here does not do again
            self._begin_checkpoint(self.writer)
        if agreed.is_asked_to_leave:
            self.finish_saving()
        return agreed.is_asked_to_leave

    def finish_saving(self) -> None:
        """Wait until the last step is saved. SaveFailedError on all ranks if it could not be."""
        if self.writer is None:
            return
        self._wait_for_save()
        if self.saved_step != self.done:
            newest = (
                say("the newest is of step {saved_step}", saved_step=self.saved_step)
                if self.saved_step
                else say("there is none")
            )
            raise SaveFailedError(
                say(
                    "the last checkpoint, of step {done}, could not be written, and {newest}; mend what was said of "
                    "it, such as a full disk, and give the same command again, without --fresh",
                    done=self.done,
                    newest=newest,
                )
            )

    def refuse_no_numbers(self) -> None:
        """RunError, on all ranks, if a run that is done ended with a loss or with weights that are not finite."""
        health = self._state_health()
        if health.cause == "not finite":
            raise RunError(
                say("the run is done, and {sentence}; {way_on}", sentence=health.sentence, way_on=self.trust.way_on())
            )

    def tell(self, lines: Sequence[str]) -> None:
        """Tell the user lines, on rank 0; empty ones are left out."""
        if self.log is not None:
            for line in filter(None, lines):
                self.log.tell(line)

    def _restore(self, state: Mapping[str, Any], health: StateHealth) -> None:
        """Take up the state of a checkpoint beside its tensors, which is so healthy."""
        self.left_out = int(state.get("schedule", {}).get("left_out", 0))  # steps that changed no weight
        if "health" in state:
            self.health.load_state_dict(state["health"])
        self.health.restore_state_health(health)

    def _num_samples(self, span: SpanRun) -> int:
        """The samples of a span that was not counted yet."""
        return samples_of(self.job, self.done, len(span.results))

    def _measure_losses(self, names: Collection[str]) -> None:
        """Measure the losses of some held-out sets, and log them."""
        if names:
            losses = self.held_out.measure(self.replica, self.done, names)
            if self.log is not None:
                self.log.evaluation(self.done, losses)

    def _has_measured(self, name: str) -> bool:
        """True if the loss of a held-out set is that of the present weights."""
        return self.held_out.step == self.done and name in self.held_out.losses

    def _begin_checkpoint(self, writer: CheckpointWriter) -> None:
        """Begin to write the present state, which replicas must hold alike."""
        self.health.compare_replicas(self.done, before_save=True)
        state = {"health": self.health.state_dict(), "schedule": {"left_out": self.left_out}}
        quality = StateQuality(self._state_health(), self.held_out.to_store(self.done))
        place = self.place.to_store(self.samples)
        self._log_saved(writer.save(self.done, self.samples, self.passed_over, state, quality, place))

    def _wait_for_save(self) -> None:
        """Wait until the checkpoint that is being written is whole, or has failed."""
        if self.writer is not None:
            self._log_saved(self.writer.wait())

    def _log_saved(self, saved: Saved | None) -> None:
        """Log a checkpoint that is whole now, if there is one."""
        if saved is None:
            return
        self.saved_step = saved.step
        if self.log is not None:
            self.log.checkpoint(saved.step, saved.blocking_s, saved.durable_s)

    def _state_health(self) -> StateHealth:
        """The health of the present state."""
        return self.health.state_health(self.done, self.held_out.worst(self.done))


def _place_in_data(job: JobSpec, folder: Path, begun: Resumed, beginning: PlaceInData) -> tuple[PlaceInData, list[str]]:
    """The place in the data where a run begins, or resumes, and lines about it."""
    manifest = begun.manifest
    if manifest is None:
        return beginning, []
    name = f"{place_of(job, folder)}/{folder_name(manifest.step)}"
    return taken_up(StoredPlace(name, manifest.job, manifest.samples, manifest.data), beginning, job)


def _prepare_data(job: JobSpec, mesh: Mesh, folder: Path) -> tuple[TokenFiles | MixedTokens, dict[str, TokenFiles]]:
    """The tokens that a run trains on, and the sets of data.validation by their names. Rank 0 turns text into tokens;
    the other ranks find them done, or on another machine do it there."""
    with in_turn_of_rank_0(mesh.watch, mesh.rank, mesh.world.size, say("the tokens")):
        refuse_missing(job.data, job.model)
        tokens = prepare_tokens(job.data, job.model, job.run.seed, folder / "data", tell=tell_aside)
        return tokens, prepare_validation(job.data, job.model, folder / "data", tell=tell_aside)
