"""The training run of one rank, first line to last."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.parallel.collectives import barrier
from shardwright.parallel.mesh import Mesh
from shardwright.spec.job import JobSpec
from shardwright.train.build import Replica, build
from shardwright.train.data import TokenFiles, prepare_tokens
from shardwright.train.generate import generate
from shardwright.train.metrics import MetricsLog, measure_shares
from shardwright.train.samples import Samples, unigram_loss
from shardwright.train.step import evaluate, train_step
from shardwright.train.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. Losses are in nats a token; `validation_loss` is None where nothing is held out."""

    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float | None
    unigram_loss: float | None
    sample: str
    folder: str
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def my_share(samples: Samples, consumed: int, job: JobSpec, mesh: Mesh) -> Tensor:
    """This replica's samples of the global batch that begins after `consumed` samples, [B, S + 1]."""
    share = job.batch.global_batch_size // job.plan.dp
    batch = samples.batch(consumed + mesh.dp.index * share, share)
    return torch.from_numpy(batch).to(mesh.device)


def train(job: JobSpec, mesh: Mesh, folder: Path) -> RunResult:
    """Train to the end of the job. Every rank calls this; rank 0 speaks."""
    start_s = time.perf_counter()
    tokens = _tokens_after_rank_0(job, mesh, folder)
    train_samples, held_out = tokens.train_samples(), tokens.validation_samples()
    replica = build(job, mesh)
    log = MetricsLog(job, mesh, folder) if mesh.rank == 0 else None
    if log is not None:
        introduce(job, mesh, tokens, log)
    batch = job.batch.global_batch_size
    losses: list[float] = []
    validation_loss = None
    for step in range(job.optimizer.steps):
        step_start_s = time.perf_counter()
        mesh.ledger.clear()
        if mesh.watch is not None:
            mesh.watch.step(step + 1)
        result = train_step(job, replica, mesh, step, my_share(train_samples, step * batch, job, mesh))
        step_s = time.perf_counter() - step_start_s
        if not math.isfinite(result.loss):
            raise RuntimeError(
                f"the loss is {result.loss} in step {step + 1} (gradient norm {result.grad_norm}); lower "
                f"optimizer.learning_rate ({job.optimizer.learning_rate:g}) or raise optimizer.warmup_steps"
            )
        losses.append(result.loss)
        shares = measure_shares(mesh, step_s)
        if log is not None:
            log.step(step + 1, result.loss, result.grad_norm, result.learning_rate, step_s, shares)
        due = job.run.eval_every and (step + 1) % job.run.eval_every == 0
        if held_out is not None and (due or step + 1 == job.optimizer.steps):
            validation_loss = held_out_loss(job, replica, mesh, held_out)
            if log is not None:
                log.evaluation(step + 1, validation_loss)
    sample = sample_text(job, replica, mesh)
    barrier(mesh.world)
    baseline = unigram_loss(tokens.train, tokens.validation, job.model.vocab) if log and tokens.validation else None
    run = RunResult(
        len(losses), losses[0], losses[-1], validation_loss, baseline, sample, str(folder),
        time.perf_counter() - start_s,
    )  # fmt: skip
    if log is not None:
        conclude(run, log)
        log.close()
    return run


def _tokens_after_rank_0(job: JobSpec, mesh: Mesh, folder: Path) -> TokenFiles:
    """Rank 0 turns text into tokens, and the others find them done (or, on another machine, do it there)."""
    if mesh.rank > 0:
        barrier(mesh.world)
    tokens = prepare_tokens(job.data, job.model, job.run.seed, folder / "data")
    if mesh.rank == 0:
        barrier(mesh.world)
    return tokens


def introduce(job: JobSpec, mesh: Mesh, tokens: TokenFiles, log: MetricsLog) -> None:
    """What is about to run, and where."""
    model, plan = job.model, job.plan
    log.say(
        f"{job.name}: {model.name}, {model.layers} layers x {model.hidden} hidden, "
        f"{model.heads} heads, {model.vocab} tokens of vocabulary, sequences of {model.sequence}"
    )
    log.say(
        f"{plan.world} ranks on {mesh.device.type}: {plan.schedule}, {job.num_microbatches} microbatches of "
        f"{plan.microbatch_size}, sequence parallel {'on' if plan.sequence_parallel else 'off'}"
    )
    log.say(str(mesh.shape) if plan.world <= 64 else str(mesh.shape).splitlines()[0])
    log.say(
        f"{tokens.num_documents:,} documents, {tokens.num_train_tokens:,} tokens to train on, "
        f"{tokens.num_validation_tokens:,} held out; {job.optimizer.steps} steps of {job.tokens_per_step:,} tokens"
    )


def conclude(run: RunResult, log: MetricsLog) -> None:
    """How it ended."""
    if run.validation_loss is not None and run.unigram_loss is not None:
        log.say(
            f"held-out loss {run.validation_loss:.4f} nats a token after {run.steps} steps; "
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
    if job.run.sample_tokens == 0 or mesh.dp.index > 0:
        return ""
    tokenizer = load_tokenizer(job.data)
    prompt = [int(i) for i in tokenizer.encode(job.run.sample_prompt)] or [0]
    written = generate(replica.stages, replica.evaluation, mesh, prompt, job.run.sample_tokens, job.run.seed)
    return tokenizer.decode(written)
