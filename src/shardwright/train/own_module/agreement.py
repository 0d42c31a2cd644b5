"""Agreement of ranks on faults: ranks exchange their faults, so that all of them raise the same error."""

from collections.abc import Mapping

import torch

from shardwright.config.base import RunError
from shardwright.parallel.comm.collectives import all_gather
from shardwright.parallel.comm.process_groups import Mesh

_MOST_BYTES = 2000  # of a rank's text; a longer one is cut
_MOST_FAULTS = 4  # different faults in a message


def told_by_all(text: str, mesh: Mesh) -> list[str]:
    """The texts of all ranks. Costs two small all-gathers over the world; every rank calls this."""
    if mesh.world.size == 1:
        return [text]
    data = text.encode(errors="replace")[:_MOST_BYTES]
    lengths = [int(n) for n in mesh.numbers(all_gather(torch.tensor([len(data)], device=mesh.device), mesh.world))]
    if not (longest := max(lengths)):
        return [""] * mesh.world.size
    padded = torch.zeros(longest, dtype=torch.uint8, device=mesh.device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = all_gather(padded, mesh.world).view(mesh.world.size, longest).cpu()
    return [bytes(row[:n].tolist()).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]


def agree(error: str, mesh: Mesh, consequence: str) -> None:
    """Return if no rank has an error, else raise the same RunError on all ranks; its message begins with `consequence`.
    Every rank calls this."""
    faults = {rank: error for rank, error in enumerate(told_by_all(error, mesh)) if error}
    if faults:
        raise RunError(f"{consequence}: {by_rank(faults, mesh.world.size)}")


def by_rank(faults: Mapping[int, str], num_ranks: int) -> str:
    """The faults of ranks in one text: each different fault once, with its ranks."""
    if num_ranks == 1:
        return next(iter(faults.values()))
    ranks: dict[str, list[int]] = {}
    for rank, fault in faults.items():
        ranks.setdefault(fault, []).append(rank)
    parts = [f"{_rank_list(at_fault)}: {fault}" for fault, at_fault in list(ranks.items())[:_MOST_FAULTS]]
    num_omitted = len(ranks) - _MOST_FAULTS
    return "; ".join(parts) + (f"; and {num_omitted} more" if num_omitted > 0 else "")


def _rank_list(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
