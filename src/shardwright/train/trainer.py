"""The training run of one rank, first line to last."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardwright.config.base import PassingError, RunError
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import counted
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.hang_watch import in_turn_of_rank_0
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.build import Replica
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.manifest import HEALTHY, StateHealth, folder_name
from shardwright.train.checkpoint.resuming import begin, go_back
from shardwright.train.checkpoint.writing import BestInterval, CheckpointWriter, Saved
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.data.place import PlaceInData, StoredPlace, taken_up
from shardwright.train.data.prepare import prepare_tokens, prepare_validation, refuse_missing
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.progress import say_aside
from shardwright.train.data.source_files import trained_on_notes
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.health.decision import Course, Decision
from shardwright.train.health.run_health import RunHealth, was_computed
from shardwright.train.health.weights_trust import WeightsTrust
from shardwright.train.held_out import HeldOutSets
from shardwright.train.metrics import MetricsLog
from shardwright.train.prompt import begun
from shardwright.train.run_lines import NOTHING_IS_KEPT, RunResult, conclude, introduce, rate_note
from shardwright.train.run_memory import measure_memory, predicted_lines
from shardwright.train.span import end_of_span, samples_of, tell_span, watched_span
from shardwright.train.steps_measured import StepsRecorder
from shardwright.train.text_generation import generate
from shardwright.train.train_step import StepResult
from shardwright.train.warm_up import warm_up


@dataclass(frozen=True)
class RunStart:
    """How a run begins and goes on, beside what its job says. `weights_from` is a folder or address whose newest
    checkpoint a new run takes its weights from; `best_interval_s` says how often to write one that takes so long."""

    predicted: Sequence[RankMemory] = ()
    weights_from: str = ""
    best_interval_s: BestInterval | None = None


class SaveFailedError(PassingError):
    """The state that a run ends with could not be saved."""


class TrainingRun:
    """One rank's run: its part of the model, where it stands, and what watches over it."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, start: RunStart) -> None:
        """Go on from the newest whole checkpoint of the folder, or begin."""
        self.job, self.mesh, self.folder, self.predicted = job, mesh, folder, start.predicted
        self.tokens, own_sets = _tokens_after_rank_0(job, mesh, folder)
        self.held_out = HeldOutSets(job, self.tokens, own_sets)
        begun = begin(job, mesh, folder, start.weights_from)
        self.place, of_place = PlaceInData.at_beginning(self.tokens, job), list[str]()
        if (kept := begun.manifest) is not None:
            name = f"{place_of(job, folder)}/{folder_name(kept.step)}"
            self.place, of_place = taken_up(StoredPlace(name, kept.job, kept.samples, kept.data), self.place, job)
        self.batches = BatchReader(self.place.train_samples(), job, mesh, job.optimizer.steps)
        self.replica = begun.replica
        self.done = self.saved_step = begun.step
        self.samples = begun.samples  # where it is in the data, those that were passed over included
        self.passed_over = begun.passed_over
        self.left_out = int(begun.state.get("schedule", {}).get("left_out", 0))  # steps that changed no weight
        self.trust = WeightsTrust(job, mesh, folder, begun.step)
        self.losses: list[float] = []
        self.memory_is_measured = False
        self.health = RunHealth(job, mesh, folder, begun.step + 1)
        if "health" in begun.state:
            self.health.load_state_dict(begun.state["health"])
        self.health.begin_with(HEALTHY if begun.manifest is None else begun.manifest.health)
        is_on = job.checkpoint.is_on
        self.writer = (
            CheckpointWriter(job, self.replica, mesh, folder, start.best_interval_s) if is_on else None
        )  # fmt: skip
        self.log = MetricsLog(job, mesh, folder, begun.step) if mesh.rank == 0 else None
        self.recorder = StepsRecorder(self.log.device_name if self.log is not None else "")
        if self.log is not None:
            introduce(job, mesh, self.tokens, self.place, self.log)
            self.tell([*predicted_lines(start.predicted), *begun.said, *of_place, self.health.opening])
            self.tell([*self.held_out.notes(), *trained_on_notes(job.data)])
            self.tell([rate_note(begun.manifest, job, self.left_out)] if begun.manifest is not None else [])
            self.tell([] if is_on else [NOTHING_IS_KEPT])
            if self.done >= job.optimizer.steps:
                self.tell([f"nothing is left to do: {self.done} of {counted(job.optimizer.steps, 'step')} are done"])

    def to_the_end(self) -> bool:
        """Train until the job is done, or until asked to leave. Returns whether it is done."""
        total = self.job.optimizer.steps
        while self.done < total:
            is_asked = self._span()
            if is_asked and self.done < total:
                return False
        self._be_saved()
        return True

    def _span(self) -> bool:
        """The steps up to the next moment at which the pipeline drains, and what is due after them. Returns whether the
        run was asked to leave, and has saved."""
        job, mesh, log, health, first = self.job, self.mesh, self.log, self.health, self.done
        num_steps = end_of_span(job, self.replica, first) - first
        try:
            span = watched_span(
                job, self.replica, mesh, first, num_steps, self.samples, self.batches, health, self.left_out
            )  # fmt: skip
        except FloatingPointError as error:  # the loss scale can't go lower
            self._be_written()
            raise RunError(f"{error}; {self.trust.way_on()}") from None
        if self.trust.see(span.results, first):
            self._be_written()
            self.trust.doubt()
        if span.decision.course in (Course.STOP, Course.REWIND):
            self.tell(span.lines)
            self._be_written()
            if span.decision.course is Course.STOP:
                self._stop(span.decision, num_steps)
            self._rewind(span.decision, num_steps)
            return False
        self.done = first + num_steps
        if was_computed(span.results, SCHEDULES[job.plan.schedule].drains):
            self.recorder.add(span.use, span.shares.peak_memory_bytes)
        self.samples += samples_of(job, first, num_steps)
        self.left_out += sum(result.skipped for result in span.results)
        self.losses += [result.loss for result in span.results if result.loss is not None]
        if log is not None:
            tell_span(span, first, health, log)
        health.compare_replicas(self.replica, self.done)
        self._measure_memory(span.results)
        self._evaluate()
        return self._save()

    def _measure_memory(self, results: list[StepResult]) -> None:
        """Once, after the first update: the optimizer has its state from then on."""
        if self.memory_is_measured or all(result.skipped for result in results):
            return
        self.memory_is_measured = True
        measured = measure_memory(self.mesh, self.replica)
        self.recorder.memory = measured[self.mesh.pp.index]
        if self.log is not None:
            self.log.memory(self.predicted, measured)

    def _evaluate(self) -> None:
        """Measure the loss on held-out text, where that is due."""
        job, every = self.job, self.job.run.eval_every
        due = self.done == job.optimizer.steps or (every and self.done % every == 0)
        if due:
            self._measure(self.held_out.readers)

    def _measure(self, names: Collection[str]) -> None:
        """Measure the losses of some sets, and tell them."""
        if names:
            losses = self.held_out.measure(self.replica, self.mesh, self.done, names)
            if self.log is not None:
                self.log.evaluation(self.done, losses)

    def _save(self) -> bool:
        """Save, where that is due. Returns whether the run was asked to leave."""
        if self.writer is None:
            return False
        agreed = self.writer.agree(self.done)
        self._tell_saved(agreed.saved)
        is_last = self.done == self.job.optimizer.steps
        best = self.job.checkpoint.keep_best
        if best and (agreed.is_due or is_last) and not agreed.is_asked_to_leave and not self._has_measured(best):
            self._measure([best])
            if self.held_out.losses[best] is None:
                self.tell([f"note: checkpoint.keep_best = {best!r} keeps nothing: no token of that set has a loss"])
        if agreed.is_due or agreed.is_asked_to_leave or is_last:
            self.health.compare_replicas(self.replica, self.done, is_saved=True)
            state = {"health": self.health.state_dict(), "schedule": {"left_out": self.left_out}}
            health, place = self._state_health(), self.place.to_store(self.samples)
            losses = self.held_out.to_store(self.done)
            self._tell_saved(
                self.writer.save(self.done, self.samples, self.passed_over, state, health, data=place, losses=losses)
            )
        if agreed.is_asked_to_leave:
            self._be_saved()
        return agreed.is_asked_to_leave

    def _has_measured(self, name: str) -> bool:
        return self.held_out.step == self.done and name in self.held_out.losses

    def _state_health(self) -> StateHealth:
        """How healthy the state is that the run has come to."""
        return self.health.state_health(self.replica, self.done, self.held_out.worst(self.done))

    def refuse_no_numbers(self) -> None:
        """RunError, on all ranks, where a run that is done has come to a loss or to weights that are no numbers."""
        health = self._state_health()
        if health.cause == "not finite":
            raise RunError(f"the run is done, and {health.sentence}; {self.trust.way_on()}")

    def _be_written(self) -> None:
        """Wait for what is being saved."""
        if self.writer is not None:
            self._tell_saved(self.writer.wait())

    def _be_saved(self) -> None:
        """Wait until the step that the run has come to is saved. SaveFailedError on all ranks where it could not be."""
        if self.writer is None:
            return
        self._tell_saved(self.writer.wait())
        if self.saved_step != self.done:
            newest = f"the newest is of step {self.saved_step}" if self.saved_step else "there is none"
            raise SaveFailedError(
                f"the last checkpoint, of step {self.done}, could not be written, and {newest}; mend what was said of "
                "it, such as a full disk, and give the same command again, without --fresh"
            )

    def tell(self, lines: Sequence[str]) -> None:
        """Tell the user lines, on rank 0; empty ones are left out."""
        if self.log is not None:
            for line in filter(None, lines):
                self.log.say(line)

    def _tell_saved(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self.saved_step = saved.step
        if self.log is not None:
            self.log.checkpoint(saved.step, saved.blocking_s, saved.durable_s)

    def _stop(self, decision: Decision, num_steps: int) -> NoReturn:
        """End the run, because of a span of so many steps. The batch behind it tells whether the weights were at
        fault."""
        if self.replica.program.weights == "current" and self.done + 1 < self.job.optimizer.steps:
            next_BS = self.batches.batch(self.done + 1, self.samples + samples_of(self.job, self.done, num_steps))
            if self.trust.is_ruined_by_next(self.replica, self.done + 1, next_BS):
                self.trust.doubt()
        raise RunError(f"{decision.sentence}; {self.trust.way_on()}")

    def _rewind(self, decision: Decision, num_steps: int) -> None:
        """Go on from the last healthy checkpoint, with the data behind those of the span of so many steps that went
        wrong. RunError without one."""
        assert self.writer is not None, "the job was refused: it goes back to checkpoints that it does not write"
        found, said = go_back(self.job, self.mesh, self.replica, self.folder)
        self.tell(said)
        if found is None:
            raise RunError(
                f"{decision.sentence}; there is no healthy checkpoint to go back to: save more often "
                "(checkpoint.every_steps), lower optimizer.learning_rate or raise optimizer.warmup_steps"
            )
        self.samples += samples_of(self.job, self.done, num_steps)
        self.passed_over = found.passed_over + self.samples - found.samples
        self.done = found.step
        self.left_out = int(found.state.get("schedule", {}).get("left_out", 0))
        self.trust.loaded(found.step)
        if "health" in found.state:
            self.health.load_state_dict(found.state["health"])
        self.health.begin_with(found.health)
        self.health.judge.rewound(decision.step)
        if self.log is not None:
            self.log.go_back(found.step)
        self.tell([f"{decision.sentence}; going on after step {found.step}, with the data behind these steps"])


def train(job: JobSpec, mesh: Mesh, folder: Path, start: RunStart = RunStart()) -> RunResult:
    """Train to the end of the job, from where its folder's newest whole checkpoint stands. Every rank calls this; rank
    0 speaks."""
    start_s = time.perf_counter()
    run = TrainingRun(job, mesh, folder, start)
    warm_up(job, mesh, run.replica.program, lambda line: run.tell([line]))
    with run.batches:
        is_done = run.to_the_end()
    if is_done:
        run.refuse_no_numbers()
    sample = sample_text(job, run.replica, mesh) if is_done else ""
    barrier(mesh.world)
    log = run.log
    baselines = dict[str, float | None]()
    if log is not None and is_done:
        baselines = run.held_out.baselines()
    result = RunResult(
        run.done, run.losses[0] if run.losses else None, run.losses[-1] if run.losses else None,
        validation_losses=run.held_out.losses, unigram_losses=baselines, sample=sample, folder=str(folder),
        seconds=time.perf_counter() - start_s, preempted=not is_done, measured=run.recorder.measured(),
    )  # fmt: skip
    if log is not None:
        if happened := run.health.conclusion():
            log.say(happened)
        conclude(result, log, keeps=job.checkpoint.is_on)
        log.close()
    return result


def _tokens_after_rank_0(
    job: JobSpec, mesh: Mesh, folder: Path
) -> tuple[TokenFiles | MixedTokens, dict[str, TokenFiles]]:
    """Rank 0 turns text into tokens, and the others find them done (or, on another machine, do it there). What is
    trained on, and the sets of data.validation by their names."""
    with in_turn_of_rank_0(mesh.watch, mesh.rank, mesh.world.size, "the tokens"):
        refuse_missing(job.data, job.model)
        tokens = prepare_tokens(job.data, job.model, job.run.seed, folder / "data", say=say_aside)
        return tokens, prepare_validation(job.data, job.model, folder / "data", say=say_aside)


def sample_text(job: JobSpec, replica: Replica, mesh: Mesh) -> str:
    """The text of the model after run.sample_prompt. The first replica writes, the others have an empty string."""
    if job.run.sample_tokens == 0:
        return ""
    with replica.gathered():  # all replicas have a part in this, and then one writes
        if mesh.dp.index > 0 and job.plan.ep == 1:  # experts may be on several, which then write the same
            return ""
        tokenizer = load_tokenizer(job.data)
        prompt, num_hidden = begun(tokenizer, tokenizer.encode(job.run.sample_prompt).tolist())
        written = generate(
            replica.stages, replica.evaluation, mesh, list(prompt), num_tokens=job.run.sample_tokens, seed=job.run.seed
        )
        try:
            return tokenizer.decode(written[num_hidden:]) if mesh.dp.index == 0 else ""
        except RunError as error:  # the run is done, and its weights are what was wanted
            return f"(none: {error})"
