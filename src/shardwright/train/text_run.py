"""A run that trains nothing: it takes weights up, under any plan, and writes text."""

from dataclasses import dataclass
from pathlib import Path

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.prompt import Prompt
from shardwright.train.text_generation import generate


@dataclass(frozen=True)
class AskedText:
    """The text to write: at most so many tokens. `weights_from` is a run, or nothing where the job names released
    weights. A temperature of 0 takes the likeliest token each time."""

    prompt: Prompt
    num_tokens: int
    temperature: float
    weights_from: str = ""


@dataclass(frozen=True)
class WrittenText:
    """A text, how many tokens of it were written, and whether it ended by itself."""

    text: str
    num_tokens: int
    has_ended: bool


def write_text(asked: AskedText, job: JobSpec, mesh: Mesh, folder: Path) -> WrittenText:
    """The prompt, where it is shown, and what follows it, on rank 0. Every rank calls this."""
    replica = begin(job, mesh, folder, asked.weights_from).replica
    prompt = asked.prompt
    with replica.gathered():
        ids = generate(
            replica.stages, replica.evaluation, mesh, list(prompt.ids), num_tokens=asked.num_tokens,
            seed=job.run.seed, temperature=asked.temperature, ends=prompt.ends,
        )  # fmt: skip
    num_tokens = len(ids) - len(prompt.ids)
    text = load_tokenizer(job.data).decode(ids[prompt.num_hidden :])
    return WrittenText(text, num_tokens, has_ended=num_tokens < asked.num_tokens)
