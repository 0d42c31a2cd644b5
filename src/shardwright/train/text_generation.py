"""Text from the model as it is sharded: every token passes the pipeline once, on the ranks that trained it.

No cache of keys and values: this is a look at what was learned, not a server.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from shardwright.config.plan import split_evenly
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.comm.collectives import all_gather, all_reduce, broadcast, start_recv, start_send
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.schedule import Program
from shardwright.sharding.sequence import positions_of


@torch.no_grad()
def generate(
    stages: dict[int, DecoderStage], program: Program, mesh: Mesh, prompt: list[int], num_tokens: int,
    seed: int, temperature: float = 0.8, ends: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """The prompt and up to `num_tokens` sampled tokens, on every rank of the pipeline: those before the first that
    `ends` a text. It sees the last `sequence` tokens."""
    assert prompt, "there must be a token to begin with"
    generator = torch.Generator().manual_seed(seed)  # alike on all ranks, so that tensor ranks draw the same token
    tokens = list(prompt)
    sequence, last = next(iter(stages.values())).spec.sequence, program.num_stages - 1
    for _ in range(num_tokens):
        window = tokens[-sequence:]
        inputs_BS = torch.zeros(1, sequence, dtype=torch.int64, device=mesh.device)
        inputs_BS[0, : len(window)] = torch.tensor(window)
        drawn = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if (x_sBH := _forward(stages, program, mesh, inputs_BS)) is not None:
            logits_SBV, held = stages[last].logits(x_sBH), positions_of(stages[last].held)
            is_here = len(window) - 1 in held
            # All ranks of cp draw, so that their generators stay alike, and the one that holds the position is heard.
            logits_V = logits_SBV[held.index(len(window) - 1) if is_here else 0, 0]
            logits_V = _gather_vocabulary(logits_V, stages[last].spec.vocab, mesh)
            drawn[0] = _drawn(logits_V.float().cpu(), temperature, generator) * is_here
            all_reduce(drawn, mesh.cp)
        broadcast(drawn, mesh.pp, program.placement.rank(last, 0))
        if int(drawn) in ends:
            break
        tokens.append(int(drawn))
    return tokens


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A token: the likeliest if the temperature is 0, else one at random."""
    if temperature == 0:
        return logits_V.argmax()
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)[0]


def _forward(stages: dict[int, DecoderStage], program: Program, mesh: Mesh, inputs_BS: Tensor) -> Tensor | None:
    """Hidden states before the head, [s, B, H], on the ranks of the last stage, None elsewhere."""
    x = inputs_BS
    here = mesh.pp.index
    mine = [(index, stage) for index, stage in stages.items() if program.placement.rank(index, 0) == here]
    for index, stage in mine:
        if index > 0 and program.placement.rank(index - 1, 0) != here:
            x = stage.empty_hidden(1)
            start_recv(x, mesh.forward, program.placement.rank(index - 1, 0), tag=index).wait()
        x = stage(x)
        if index + 1 < program.num_stages and program.placement.rank(index + 1, 0) != here:
            start_send(x, mesh.forward, program.placement.rank(index + 1, 0), tag=index + 1).wait()
    return x if program.placement.rank(program.num_stages - 1, 0) == here else None


def _gather_vocabulary(mine_V: Tensor, vocab: int, mesh: Mesh) -> Tensor:
    """All ranks' rows of the logits; shares may differ by one row, so they travel padded."""
    shares = [split_evenly(vocab, mesh.tp.size, i) for i in range(mesh.tp.size)]
    longest = max(end - start for start, end in shares)
    padded = torch.nn.functional.pad(mine_V, (0, longest - mine_V.shape[0]))
    rows = all_gather(padded, mesh.tp).view(mesh.tp.size, longest)
    return torch.cat([row[: end - start] for row, (start, end) in zip(rows, shares, strict=True)])
