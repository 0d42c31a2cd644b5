"""The memory account of a run: what every pipeline rank holds, beside what was predicted."""

from collections.abc import Sequence
from dataclasses import astuple

import torch

from shardwright.config.units import memory_text
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.build import Replica


def measure_memory(mesh: Mesh, replica: Replica) -> list[RankMemory]:
    """Memory of every pipeline rank, of the first replica and tensor-parallel rank; the same on every rank.

    After the first update. Activations are not measured, for that would take as long as the step: they are 0. Moves
    one small all-reduce over the world.
    """
    mine = astuple(replica.memory())
    values = torch.zeros(mesh.pp.size, len(mine), dtype=torch.int64)
    if mesh.is_first_replica:
        values[mesh.pp.index] = torch.tensor(mine)
    rows = all_reduce(values.to(mesh.device), mesh.world).tolist()
    return [RankMemory(*row) for row in rows]


def predicted_lines(predicted: Sequence[RankMemory]) -> list[str]:
    """Lines before the run."""
    return [f"pp rank {rank} will hold {memory}" for rank, memory in _shown(predicted)]


def measured_lines(predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> list[str]:
    """Lines after the first update: the memory that stays, and its differences from the prediction.

    Of the buffers the pool's alone are measured; messages and the memory of collectives are not.
    """
    lines = []
    for rank, memory in _shown(measured):
        texts = []
        for kind in ("parameters", "gradients", "optimizer", "host"):
            num_bytes = getattr(memory, f"{kind}_bytes")
            foretold = getattr(predicted[rank], f"{kind}_bytes") if predicted else num_bytes
            if num_bytes or foretold:
                differs = "" if num_bytes == foretold else f", predicted {memory_text(foretold)}"
                texts.append(f"{kind} {memory_text(num_bytes)}{differs}")
        texts.append(f"pool of buffers {memory_text(memory.buffers_bytes)}")
        as_predicted = predicted and memory.state_bytes == predicted[rank].state_bytes
        lines.append(f"pp rank {rank} holds {', '.join(texts)}" + ("; state as predicted" if as_predicted else ""))
    return lines


def _shown(memory: Sequence[RankMemory]) -> list[tuple[int, RankMemory]]:
    """All ranks, or of a long pipeline the one that holds most."""
    numbered = list(enumerate(memory))
    return numbered if len(numbered) <= 8 else [max(numbered, key=lambda entry: entry[1].total_bytes)]
