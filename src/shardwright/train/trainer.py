"""The training run of one rank, first line to last."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.config.units import counted
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.hang_watch import in_turn_of_rank_0
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica, build
from shardwright.train.data.prepare import TokenFiles, prepare_tokens
from shardwright.train.data.samples import Samples, unigram_loss
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.health.decision import Course, Decision, Judge, go_on
from shardwright.train.health.gpu_readings import gpu_sentences
from shardwright.train.health.run_health import RunHealth
from shardwright.train.launch.out_of_memory import telling_what_is_held
from shardwright.train.metrics import MetricsLog, Shares, measure_shares
from shardwright.train.run_memory import measure_memory, predicted_lines
from shardwright.train.text_generation import generate
from shardwright.train.train_step import StepResult, evaluate, train_step


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. Losses are in nats a token; `validation_loss` is None where nothing is held out.

    `preempted` where it was asked to leave: it has saved, and can go on.
    """

    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float | None
    unigram_loss: float | None
    sample: str
    folder: str
    seconds: float
    preempted: bool = False


def my_share(samples: Samples, consumed: int, job: JobSpec, mesh: Mesh) -> Tensor:
    """This replica's samples of the global batch that begins after `consumed` samples, [B, S + 1]."""
    share = job.batch.global_batch_size // job.plan.dp
    batch = samples.batch(consumed + mesh.dp.index * share, share)
    return torch.from_numpy(batch).to(mesh.device)


def train(job: JobSpec, mesh: Mesh, folder: Path, predicted: Sequence[RankMemory] = ()) -> RunResult:
    """Train to the end of the job. Every rank calls this; rank 0 speaks.

    `predicted` is the memory account by pipeline rank, to be shown beside the one that is measured.
    """
    start_s = time.perf_counter()
    tokens = _tokens_after_rank_0(job, mesh, folder)
    train_samples, held_out = tokens.train_samples(), tokens.validation_samples()
    replica = build(job, mesh)
    log = MetricsLog(job, mesh, folder) if mesh.rank == 0 else None
    if log is not None:
        introduce(job, mesh, tokens, log)
        for line in predicted_lines(predicted):
            log.say(line)
    health = RunHealth(job, mesh, folder)
    if log is not None and health.opening:
        log.say(health.opening)
    losses: list[float] = []
    validation_loss = None
    for first, num_steps in spans(job, replica):
        span = watched_span(job, replica, mesh, first, num_steps=num_steps, samples=train_samples, health=health)
        if span.decision.course in (Course.STOP, Course.REWIND):
            raise RunError(span.decision.sentence)
        done = first + num_steps
        losses += [result.loss for result in span.results]
        if log is not None:
            tell_span(span, first, health, log)
        health.compare_replicas(replica, done)
        if first == 0:  # the optimizer has its state from the first update on
            measured = measure_memory(mesh, replica)
            if log is not None:
                log.memory(predicted, measured)
        due = job.run.eval_every and done % job.run.eval_every == 0
        if held_out is not None and (due or done == job.optimizer.steps):
            validation_loss = held_out_loss(job, replica, mesh, held_out)
            if log is not None:
                log.evaluation(done, validation_loss)
    sample = sample_text(job, replica, mesh)
    barrier(mesh.world)
    baseline = unigram_loss(tokens.train, tokens.validation, job.model.vocab) if log and tokens.validation else None
    run = RunResult(
        len(losses), losses[0], losses[-1], validation_loss, unigram_loss=baseline, sample=sample, folder=str(folder),
        seconds=time.perf_counter() - start_s,
    )  # fmt: skip
    if log is not None:
        if happened := health.conclusion():
            log.say(happened)
        conclude(run, log)
        log.close()
    return run


def _tokens_after_rank_0(job: JobSpec, mesh: Mesh, folder: Path) -> TokenFiles:
    """Rank 0 turns text into tokens, and the others find them done (or, on another machine, do it there)."""
    with in_turn_of_rank_0(mesh.watch, mesh.rank, mesh.world.size, "the tokens"):
        return prepare_tokens(job.data, job.model, job.run.seed, folder / "data")


def spans(job: JobSpec, replica: Replica) -> Iterator[tuple[int, int]]:
    """(first step, number of steps) of what runs without draining the pipeline.

    One step, or of a schedule that need not drain, all steps up to the next progress line or evaluation.
    """
    step, total = 0, job.optimizer.steps
    while step < total:
        ends = [total]
        if replica.program.weights == "current":
            ends.append(step + 1)
        else:
            ends += [step // every * every + every for every in (job.run.log_every, job.run.eval_every) if every]
        yield step, min(ends) - step
        step = min(ends)


def train_span(
    job: JobSpec, replica: Replica, mesh: Mesh, first: int, num_steps: int, samples: Samples, judge: Judge = go_on
) -> list[StepResult]:
    """The steps of one span. The `judge` is asked where a step's update waits for it."""

    def batch_of(step: int) -> Tensor:
        return my_share(samples, (first + step) * job.batch.global_batch_size, job, mesh)

    if replica.program.weights == "current":
        return [train_step(job, replica, mesh, first, tokens_BS=batch_of(0), judge=judge)]
    return train_stream(job, replica, mesh, job_program(job, num_steps), first_step=first, batch_of=batch_of)


@dataclass(frozen=True)
class SpanRun:
    """What a span gave: its steps, seconds and shares of one of them, how the run goes on, and what to say."""

    results: list[StepResult]
    step_s: float
    shares: Shares
    decision: Decision
    lines: list[str]


def watched_span(
    job: JobSpec, replica: Replica, mesh: Mesh, first: int, num_steps: int, samples: Samples, health: RunHealth
) -> SpanRun:
    """The steps of one span, timed, counted and looked at."""
    batch = my_share(samples, first * job.batch.global_batch_size, job, mesh) if num_steps == 1 else None
    health.before_span(replica, first, batch)
    start_s, saved_before_bytes = time.perf_counter(), replica.compression_bytes_saved()
    mesh.ledger.clear()
    if mesh.watch is not None:
        mesh.watch.step(first + 1)
    with telling_what_is_held(replica.memory), health.recording(replica, first, num_steps):
        results = train_span(job, replica, mesh, first, num_steps=num_steps, samples=samples, judge=health.judge)
    span_s = time.perf_counter() - start_s
    saved_bytes = (replica.compression_bytes_saved() - saved_before_bytes) / num_steps
    shares = measure_shares(mesh, span_s, saved_bytes, num_steps)
    decision, lines = health.after_span(replica, first, results, span_s, batch)
    return SpanRun(results, span_s / num_steps, shares, decision, lines)


def tell_span(span: SpanRun, first: int, health: RunHealth, log: MetricsLog) -> None:
    """Record the steps of a span, and say what health has to say."""
    gpus = health.gpus(first + len(span.results))
    for step, result in enumerate(span.results, first + 1):
        log.step(step, result, span.step_s, span.shares, counts=health.judge.counts, gpus=gpus)
    for line in [*span.lines, *gpu_sentences(gpus)]:
        log.say(line)


def introduce(job: JobSpec, mesh: Mesh, tokens: TokenFiles, log: MetricsLog) -> None:
    """What is about to run, and where."""
    model, plan = job.model, job.plan
    log.say(
        f"{job.name}: {model.name}, {counted(model.layers, 'layer')} x {model.hidden} hidden, "
        f"{counted(model.heads, 'head')}, {model.vocab:,} tokens of vocabulary, sequences of {model.sequence}"
    )
    log.say(
        f"{counted(plan.world, 'rank')} on {mesh.device.type}: {plan.schedule}, "
        f"{counted(job.num_microbatches, 'microbatch')} of "
        f"{plan.microbatch_size}, sequence parallel {'on' if plan.sequence_parallel else 'off'}"
    )
    log.say(str(mesh.shape) if plan.world <= 64 else str(mesh.shape).splitlines()[0])
    log.say(
        f"{counted(tokens.num_documents, 'document')}, {tokens.num_train_tokens:,} tokens to train on, "
        f"{tokens.num_validation_tokens:,} held out; "
        f"{counted(job.optimizer.steps, 'step')} of {job.tokens_per_step:,} tokens"
    )
    if tokens.dropped_share:
        log.say(f"the tokenizer has no token for {tokens.dropped_share:.2%} of the text's characters, and drops them")


def conclude(run: RunResult, log: MetricsLog) -> None:
    """How it ended."""
    if run.validation_loss is not None and run.unigram_loss is not None:
        log.say(
            f"held-out loss {run.validation_loss:.4f} nats a token after {counted(run.steps, 'step')}; "
            f"a unigram model of the same text has {run.unigram_loss:.4f}"
        )
    if run.sample:
        log.say("a sample of what it writes:\n" + "\n".join("  | " + line for line in run.sample.splitlines()))
    log.say(f"{run.seconds:.0f} s; metrics in {run.folder}/metrics.jsonl and {run.folder}/tensorboard")


def held_out_loss(job: JobSpec, replica: Replica, mesh: Mesh, held_out: Samples) -> float:
    """Mean loss over the first run.eval_batches global batches of held-out text."""
    batch = job.batch.global_batch_size
    total = sum(
        evaluate(job, replica, mesh, my_share(held_out, i * batch, job, mesh)) for i in range(job.run.eval_batches)
    )
    return total / job.run.eval_batches


def sample_text(job: JobSpec, replica: Replica, mesh: Mesh) -> str:
    """What the model writes after run.sample_prompt. The first replica writes, the others have an empty string."""
    if job.run.sample_tokens == 0:
        return ""
    with replica.gathered():  # all replicas have a part in this, and then one writes
        if mesh.dp.index > 0 and job.plan.ep == 1:  # experts may be on several, which then write the same
            return ""
        tokenizer = load_tokenizer(job.data)
        prompt = [int(i) for i in tokenizer.encode(job.run.sample_prompt)] or [0]
        written = generate(
            replica.stages, replica.evaluation, mesh, prompt, num_tokens=job.run.sample_tokens, seed=job.run.seed
        )
        return tokenizer.decode(written) if mesh.dp.index == 0 else ""
