"""A run that trains nothing: it takes weights up, under any plan, and writes text."""

from dataclasses import dataclass
from pathlib import Path

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.text_generation import generate


@dataclass(frozen=True)
class AskedText:
    """What is to be written. `first_ids` are tokens before the prompt; `weights_from` is a run, or nothing where the
    job names released weights. A temperature of 0 takes the likeliest token each time."""

    prompt: str
    num_tokens: int
    temperature: float
    weights_from: str = ""
    first_ids: tuple[int, ...] = ()


def write_text(asked: AskedText, job: JobSpec, mesh: Mesh, folder: Path) -> str:
    """The prompt and what follows it, on rank 0. Every rank calls this."""
    replica = begin(job, mesh, folder, asked.weights_from).replica
    tokenizer = load_tokenizer(job.data)
    ids = [*asked.first_ids, *(int(i) for i in tokenizer.encode(asked.prompt))] or [0]
    with replica.gathered():
        written = generate(
            replica.stages, replica.evaluation, mesh, ids, num_tokens=asked.num_tokens, seed=job.run.seed,
            temperature=asked.temperature,
        )  # fmt: skip
    return tokenizer.decode(written[len(asked.first_ids) :])
