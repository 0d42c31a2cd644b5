"""Inputs of attention, and ranks that share its sequence, for tests of its parts."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.transport import GroupTransport
from support.ranks import PATIENCE_S


def inputs(heads: int, kv_heads: int, dtype: torch.dtype, sequence: int = 32) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, [S, B, heads, D]."""
    generator = torch.Generator().manual_seed(heads)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(sequence, 3, count, 8, generator=generator).to(dtype) for count in counts]


def documents(sequence: int = 32) -> Tensor:
    """[B, S]: one document; several, one of a single token; and a new one for every token of a rank's chunk."""
    starts_BS = torch.zeros(3, sequence, dtype=torch.int64)
    starts_BS[1, torch.tensor([5, 6, 17, 24])] = 1
    starts_BS[2, 4:9] = 1
    return starts_BS.cumsum(1)


def bare_axis(rank: int, store: str, size: int) -> Axis:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE_S)
    )
    return Axis("cp", tuple(range(size)), rank, GroupTransport(dist.group.WORLD), Ledger(torch.device("cpu")), None)
