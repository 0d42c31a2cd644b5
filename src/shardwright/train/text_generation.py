"""Text generation with the sharded model: every token is one forward pass through the pipeline, on the training ranks.

A run writes a sample at its end, and a run that only generates loads its weights under any plan.

There is no cache of keys and values: this shows what the model has learned, and is no server.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.config.plan import split_evenly
from shardwright.parallel.comm.collectives import all_gather, all_reduce, broadcast, start_recv, start_send
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.sequence import positions_of
from shardwright.train.build import Replica
from shardwright.train.checkpoint.resuming import begin
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.prompt import Prompt, begun


@torch.no_grad()
def generate(
    replica: Replica,
    prompt: list[int],
    num_tokens: int,
    seed: int,
    temperature: float = 0.8,
    ends: Collection[int] = (),
) -> list[int]:
    """The prompt and up to `num_tokens` sampled tokens, on every rank of the pipeline. Generation stops before the
    first token of `ends`. The model sees the last `sequence` tokens."""
    assert prompt, "there must be a token to begin with"
    stages, program, mesh = replica.stages, replica.evaluation, replica.mesh
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks, so that tp ranks sample the same token
    tokens = list(prompt)
    sequence, last = next(iter(stages.values())).spec.sequence, program.num_stages - 1
    for _ in range(num_tokens):
        window = tokens[-sequence:]
        inputs_BS = torch.zeros(1, sequence, dtype=torch.int64, device=mesh.device)
        inputs_BS[0, : len(window)] = torch.tensor(window)
        token = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if (x_sBH := _forward(replica, inputs_BS)) is not None:
            logits_SBV, positions = stages[last].logits(x_sBH), positions_of(stages[last].held)
            has_position = len(window) - 1 in positions
            # All cp ranks sample, so that their generators stay equal; only the rank with the position contributes.
            logits_V = logits_SBV[positions.index(len(window) - 1) if has_position else 0, 0]
            logits_V = _gather_vocabulary(logits_V, stages[last].spec.vocab, mesh)
            token[0] = _sampled(mesh.on_host(logits_V.float()), temperature, generator) * has_position
            all_reduce(token, mesh.cp)
        broadcast(token, mesh.pp, program.placement.rank(last, 0))
        next_token = int(mesh.numbers(token)[0])
        if next_token in ends:
            break
        tokens.append(next_token)
    return tokens


def _sampled(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A token: the likeliest if the temperature is 0, else a random one."""
    if temperature == 0:
        return logits_V.argmax()
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)[0]


def _forward(replica: Replica, inputs_BS: Tensor) -> Tensor | None:
    """The hidden states before the head, [s, B, H], on the ranks of the last stage; None on other ranks."""
    x, program, mesh = inputs_BS, replica.evaluation, replica.mesh
    pp_rank, last = mesh.pp.index, program.num_stages - 1
    for index, stage in replica.stages.items():
        if program.placement.rank(index, 0) != pp_rank:
            continue
        if index > 0 and program.placement.rank(index - 1, 0) != pp_rank:
            x = stage.empty_hidden(1)
            start_recv(x, mesh.forward, program.placement.rank(index - 1, 0), tag=index).wait()
        x = stage(x)
        if index < last and program.placement.rank(index + 1, 0) != pp_rank:
            start_send(x, mesh.forward, program.placement.rank(index + 1, 0), tag=index + 1).wait()
    return x if program.placement.rank(last, 0) == pp_rank else None


def _gather_vocabulary(logits_V: Tensor, vocab: int, mesh: Mesh) -> Tensor:
    """The logits of the whole vocabulary, from each tp rank's rows; shares may differ by one row, so they are
    padded."""
    shares = [split_evenly(vocab, mesh.tp.size, i) for i in range(mesh.tp.size)]
    longest = max(end - start for start, end in shares)
    padded = torch.nn.functional.pad(logits_V, (0, longest - logits_V.shape[0]))
    rows = all_gather(padded, mesh.tp).view(mesh.tp.size, longest)
    return torch.cat([row[: end - start] for row, (start, end) in zip(rows, shares, strict=True)])


@dataclass(frozen=True)
class AskedText:
    """The request for a text of at most `num_tokens` tokens, which are drawn from `seed`. `weights_from` is a run, or
    empty if the job names released weights. A temperature of 0 takes the likeliest token each time."""

    prompt: Prompt
    num_tokens: int
    temperature: float
    seed: int
    weights_from: str = ""


@dataclass(frozen=True)
class WrittenText:
    """The generated text and its number of tokens. `has_ended`: the model wrote an end token. `lines` tell the user
    which checkpoint the weights are of, and which ones were passed over."""

    text: str
    num_tokens: int
    has_ended: bool
    lines: tuple[str, ...] = ()


def write_text(request: AskedText, job: JobSpec, mesh: Mesh, folder: Path) -> WrittenText:
    """The shown part of the prompt and the generated text. Every rank calls this."""
    begun_run = begin(job, mesh, folder, request.weights_from)
    replica, prompt = begun_run.replica, request.prompt
    with replica.gathered():
        ids = generate(
            replica, list(prompt.ids), request.num_tokens, request.seed, request.temperature, ends=prompt.ends
        )
    num_tokens = len(ids) - len(prompt.ids)
    text = load_tokenizer(job.data).decode(ids[prompt.num_hidden :])
    return WrittenText(text, num_tokens, has_ended=num_tokens < request.num_tokens, lines=begun_run.lines)


def sample_text(replica: Replica) -> str:
    """The text of the model after run.sample_prompt. The first replica writes; the others return an empty string."""
    job, mesh = replica.job, replica.mesh
    if job.run.sample_tokens == 0:
        return ""
    with replica.gathered():  # all replicas have a part in this, and then one writes
        if mesh.dp.index > 0 and job.plan.ep == 1:  # experts may be on several replicas, which then write the same
            return ""
        tokenizer = load_tokenizer(job.data)
        prompt, num_hidden = begun(tokenizer, tokenizer.encode(job.run.sample_prompt).tolist())
        ids = generate(replica, list(prompt), job.run.sample_tokens, job.run.seed)
        try:
            return tokenizer.decode(ids[num_hidden:]) if mesh.dp.index == 0 else ""
        except RunError as error:  # the run is done, and its weights are what was wanted
            return f"(none: {error})"
