"""A run that loads weights under any plan and generates text, without training."""

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
    """The request for a text of at most `num_tokens` tokens. `weights_from` is a run, or empty if the job names
    released weights. A temperature of 0 takes the likeliest token each time."""

    prompt: Prompt
    num_tokens: int
    temperature: float
    weights_from: str = ""


@dataclass(frozen=True)
class WrittenText:
    """The generated text and its number of tokens. `has_ended`: the model wrote an end token."""

    text: str
    num_tokens: int
    has_ended: bool


def write_text(request: AskedText, job: JobSpec, mesh: Mesh, folder: Path) -> WrittenText:
    """The shown part of the prompt and the generated text. Every rank calls this."""
    replica = begin(job, mesh, folder, request.weights_from).replica
    prompt = request.prompt
    with replica.gathered():
        ids = generate(
            replica.stages,
            replica.evaluation,
            mesh,
            list(prompt.ids),
            num_tokens=request.num_tokens,
            seed=job.run.seed,
            temperature=request.temperature,
            ends=prompt.ends,
        )
    num_tokens = len(ids) - len(prompt.ids)
    text = load_tokenizer(job.data).decode(ids[prompt.num_hidden :])
    return WrittenText(text, num_tokens, has_ended=num_tokens < request.num_tokens)
