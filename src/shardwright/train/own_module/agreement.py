"""Agreement of ranks on faults: each rank tells its sentence, so that all of them raise the same error."""

from collections.abc import Mapping

import torch

from shardwright.config.base import RunError
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh

_MOST_BYTES = 2000  # of a rank's sentence; what is longer is cut
_MOST_TOLD = 4  # ranks whose sentences are repeated


def told_by_all(text: str, mesh: Mesh) -> list[str]:
    """The sentence of each rank. Moves two small all-gathers over the world; every rank calls this."""
    if mesh.world.size == 1:
        return [text]
    data = text.encode(errors="replace")[:_MOST_BYTES]
    lengths = [int(n) for n in mesh.numbers(all_gather(torch.tensor([len(data)], device=mesh.device), mesh.world))]
    if not (most := max(lengths)):
        return [""] * mesh.world.size
    mine = torch.zeros(most, dtype=torch.uint8, device=mesh.device)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = all_gather(mine, mesh.world).view(mesh.world.size, most).cpu()
    return [bytes(row[:n].tolist()).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]


def agree(error: str, mesh: Mesh, what: str) -> None:
    """Go on where no rank has an error. RunError on all ranks, with the same words, where one has. Every rank calls
    this."""
    said = {rank: error for rank, error in enumerate(told_by_all(error, mesh)) if error}
    if said:
        raise RunError(f"{what}: {by_rank(said, mesh.world.size)}")


def by_rank(said: Mapping[int, str], num_ranks: int) -> str:
    """The sentences of ranks, each once, with the ranks that tell it."""
    if num_ranks == 1:
        return next(iter(said.values()))
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    parts = [f"{_named(who)}: {text}" for text, who in list(ranks.items())[:_MOST_TOLD]]
    more = len(ranks) - _MOST_TOLD
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
