"""Steps of a run from one moment at which the pipeline drains to the next: run, timed, counted and looked at."""

import time
from dataclasses import dataclass

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.schedule.job_program import job_program
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.health.gpu_readings import gpu_sentences
from shardwright.train.health.run_health import RunHealth
from shardwright.train.health.step_judge import Decision, Judge
from shardwright.train.launch import preemption
from shardwright.train.launch.out_of_memory import telling_what_is_held
from shardwright.train.metrics import MetricsLog
from shardwright.train.step_metrics import MeasuredStep, Shares, measure_shares
from shardwright.train.steps_measured import SpanUse, span_use
from shardwright.train.train_step import StepResult, train_step


def samples_of(job: JobSpec, first: int, num_steps: int) -> int:
    """Samples of some steps, from `first` on."""
    return job.batch.samples_before(first + num_steps) - job.batch.samples_before(first)


def end_of_span(replica: Replica, step: int) -> int:
    """The step up to which the pipeline does not drain, from `step` on: the next one, or of a schedule that need not
    drain the next progress line, evaluation or checkpoint by steps, or the first with a larger batch."""
    if replica.program.weights == "current":
        return step + 1
    job = replica.job
    everies = (job.run.log_every, job.run.eval_every, job.checkpoint.every_steps)
    ends = [job.optimizer.steps, *(step // every * every + every for every in everies if every)]
    return min(ends if (grows := job.batch.next_change(step)) is None else [*ends, grows])


@dataclass(frozen=True)
class SpanStart:
    """The start of a span of `num_steps`: steps, samples, and steps that changed no weight, each counted before it."""

    step: int
    num_steps: int
    samples: int
    left_out: int


def train_span(replica: Replica, start: SpanStart, batches: BatchReader, judge: Judge) -> list[StepResult]:
    """The steps of one span. The `judge` is asked before the update of a step, if nothing waits behind the update."""
    job = replica.job

    def batch_of(step: int) -> Tensor:
        return batches.batch(start.step + step, start.samples + samples_of(job, start.step, step))

    if replica.program.weights == "current":
        return [train_step(replica, start.step, batch_of(0), judge, start.left_out)]
    program = job_program(job.at_step(start.step), start.num_steps)
    return train_stream(replica, program, start.step, batch_of, start.left_out)


@dataclass(frozen=True)
class SpanRun:
    """The result of a span: its steps, seconds and shares of one of them, the use of this rank in one, how the run goes
    on, and lines to print."""

    results: list[StepResult]
    step_s: float
    shares: Shares
    use: SpanUse
    decision: Decision
    lines: list[str]


def watched_span(replica: Replica, start: SpanStart, batches: BatchReader, health: RunHealth) -> SpanRun:
    """The steps of one span, timed, counted and judged. Its time contains the time that it waits for data."""
    mesh, first, num_steps = replica.mesh, start.step, start.num_steps
    before_data_s = time.perf_counter()
    batch = batches.batch(first, start.samples) if num_steps == 1 else None
    waited_s = time.perf_counter() - before_data_s
    health.before_span(first, batch)
    start_s, saved_before_bytes = time.perf_counter() - waited_s, replica.compression_bytes_saved()
    mesh.ledger.clear()
    if mesh.watch is not None:
        mesh.watch.step(first + 1)
    with telling_what_is_held(replica.memory), health.recording(first, num_steps):
        results = train_span(replica, start, batches, health.judge)
    span_s = time.perf_counter() - start_s
    preemption.watch_requests()
    saved_bytes = (replica.compression_bytes_saved() - saved_before_bytes) / num_steps
    use = span_use(mesh.ledger, span_s, first, num_steps, is_whole=not any(result.skipped for result in results))
    shares = measure_shares(mesh, span_s, saved_bytes, num_steps)
    decision, lines = health.after_span(first, results, span_s, batch)
    return SpanRun(results, span_s / num_steps, shares, use=use, decision=decision, lines=lines)


def tell_span(span: SpanRun, first: int, health: RunHealth, log: MetricsLog) -> None:
    """Record the steps of a span, and say what health has to say."""
    gpus = health.gpus(first + len(span.results))
    for step, result in enumerate(span.results, first + 1):
        log.step(MeasuredStep(step, result, span.step_s, span.shares, health.judge.counts, gpus))
    for line in [*span.lines, *gpu_sentences(gpus)]:
        log.say(line)
