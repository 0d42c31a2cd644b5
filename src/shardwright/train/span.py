"""Steps of a run from one moment at which the pipeline drains to the next: run, timed, counted and looked at."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.ledger import BlockedTime
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica
from shardwright.train.data.batch_reader import BatchReader
from shardwright.train.health.gpu_readings import gpu_sentences
from shardwright.train.health.run_health import RunHealth
from shardwright.train.health.step_judge import Decision, Judge, StepCounts
from shardwright.train.launch import preemption
from shardwright.train.launch.out_of_memory import telling_what_is_held
from shardwright.train.metrics import MetricsLog
from shardwright.train.step_metrics import (
    MeasuredStep,
    OwnShares,
    Shares,
    peak_memory_bytes,
    sent_bytes_of_step,
    summed_shares,
)
from shardwright.train.steps_measured import SpanBytes, SpanUse, span_bytes
from shardwright.train.train_step import StepResult, Votes, train_step


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


def train_span(
    replica: Replica, start: SpanStart, batches: BatchReader, judge: Judge, votes: Votes | None = None
) -> list[StepResult]:
    """The steps of one span. The `judge` is asked before the update of a step, if nothing waits behind the update. The
    last result has the numbers that `votes` gives, unless the step had no target."""
    job = replica.job

    def batch_of(step: int) -> Tensor:
        return batches.batch(start.step + step, start.samples + samples_of(job, start.step, step))

    if replica.program.weights == "current":
        return [train_step(replica, start.step, batch_of(0), judge, start.left_out, votes)]
    program = job_program(job.at_step(start.step), start.num_steps)
    return train_stream(replica, program, start.step, batch_of, start.left_out, votes)


@dataclass(frozen=True)
class SpanAccount:
    """This rank's measurements of a span that need no wait: its seconds, until the host had launched it; the events
    that tell for how long the rank was blocked; the bytes of the span, None if a step was skipped, which moves less;
    the bytes that compression saved and those that were sent in one step; the peak memory of this rank so far."""

    span_s: float
    blocked: BlockedTime
    moved: SpanBytes | None
    compression_bytes_saved: float
    sent_bytes: tuple[float, ...]
    peak_memory_bytes: int


@dataclass(frozen=True)
class SpanRun:
    """The result of a span that begins after the first `first` steps: its steps, its account, the counts of the run
    after it, how the run goes on, and lines to print."""

    first: int
    results: list[StepResult]
    account: SpanAccount
    counts: StepCounts
    decision: Decision
    lines: list[str]


@dataclass(frozen=True)
class SpanMeasured:
    """The measurements of a span: shares and use of one of its steps."""

    span: SpanRun
    shares: Shares
    use: SpanUse


def watched_span(
    replica: Replica, start: SpanStart, batches: BatchReader, health: RunHealth, votes: Votes | None = None
) -> SpanRun:
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
        results = train_span(replica, start, batches, health.judge, votes)
    account = SpanAccount(
        time.perf_counter() - start_s,
        mesh.ledger.take_blocked(),
        None if any(result.skipped for result in results) else span_bytes(mesh.ledger, first, num_steps),
        compression_bytes_saved=(replica.compression_bytes_saved() - saved_before_bytes) / num_steps,
        sent_bytes=sent_bytes_of_step(mesh.ledger, num_steps),
        peak_memory_bytes=peak_memory_bytes(mesh.device),
    )
    preemption.watch_requests()
    decision, lines = health.after_span(first, results, batch)
    return SpanRun(first, results, account, counts=replace(health.judge.counts), decision=decision, lines=lines)


def read_spans(mesh: Mesh, spans: Sequence[SpanRun]) -> list[SpanMeasured]:
    """The measurements of some spans, for which the host waits until the last of them is over, and for all ranks. Moves
    two small all-reduces over the world."""
    accounts = [span.account for span in spans]
    # On a device the host has launched a span before it is over. Its end counts to the next span, for which the host
    # waits with its numbers; the end of the last span is waited for here, and then all are over.
    end_s = [mesh.ledger.wait_for(account.blocked) for account in reversed(accounts)][::-1]
    own = [
        OwnShares(
            account.span_s + waited_s,
            mesh.ledger.seconds(account.blocked),
            account.peak_memory_bytes,
            account.compression_bytes_saved,
            account.sent_bytes,
        )
        for account, waited_s in zip(accounts, end_s, strict=True)
    ]
    measured = []
    for span, part, shares in zip(spans, own, summed_shares(mesh, own), strict=True):
        num_steps = len(span.results)
        blocked_s = {axis: seconds / num_steps for axis, seconds in part.blocked_s.items()}
        measured.append(SpanMeasured(span, shares, SpanUse(part.span_s / num_steps, blocked_s, span.account.moved)))
    return measured


def tell_span(measured: SpanMeasured, more_lines: Sequence[str], health: RunHealth, log: MetricsLog) -> None:
    """Record the steps of a span, and say what health has to say, and `more_lines` after it."""
    span = measured.span
    gpus = health.gpus(span.first + len(span.results))
    for step, result in enumerate(span.results, span.first + 1):
        log.step(MeasuredStep(step, result, measured.use.step_s, measured.shares, span.counts, gpus))
    for line in [*span.lines, *more_lines, *gpu_sentences(gpus)]:
        log.tell(line)
