"""The memory account of a run: measured and predicted memory of every pipeline rank."""

from collections.abc import Sequence
from dataclasses import astuple

import torch

from shardwright.config.units import memory_text
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.build import Replica


def measure_memory(mesh: Mesh, replica: Replica) -> list[RankMemory]:
    """The memory of every pipeline rank, in the first replica and tensor-parallel rank; the same list on every rank.

    Call it after the first update. Activations count as 0: to measure them would take as long as a step. Moves one
    small all-reduce over the world.
    """
    own_bytes = astuple(replica.memory())
    values = torch.zeros(mesh.pp.size, len(own_bytes), dtype=torch.int64)
    if mesh.is_first_replica:
        values[mesh.pp.index] = torch.tensor(own_bytes)
    rows = all_reduce(values.to(mesh.device), mesh.world).tolist()
    return [RankMemory(*row) for row in rows]


def predicted_lines(predicted: Sequence[RankMemory]) -> list[str]:
    """The lines of predicted memory, before the run."""
    return [f"pp rank {rank} will hold {memory}" for rank, memory in _shown(predicted)]


def measured_lines(predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> list[str]:
    """The lines of measured memory, after the first update: the memory that stays, and differences from the prediction.

    Only the buffers of the pool are measured, not messages and the memory of collectives.
    """
    lines = []
    for rank, memory in _shown(measured):
        texts = []
        for kind in ("parameters", "gradients", "optimizer", "host"):
            num_bytes = getattr(memory, f"{kind}_bytes")
            predicted_bytes = getattr(predicted[rank], f"{kind}_bytes") if predicted else num_bytes
            if num_bytes or predicted_bytes:
                difference = "" if num_bytes == predicted_bytes else f", predicted {memory_text(predicted_bytes)}"
                texts.append(f"{kind} {memory_text(num_bytes)}{difference}")
        texts.append(f"pool of buffers {memory_text(memory.buffers_bytes)}")
        as_predicted = predicted and memory.state_bytes == predicted[rank].state_bytes
        lines.append(f"pp rank {rank} holds {', '.join(texts)}" + ("; state as predicted" if as_predicted else ""))
    return lines


def _shown(memory: Sequence[RankMemory]) -> list[tuple[int, RankMemory]]:
    """All pipeline ranks with their memory, or in a long pipeline only the rank with most memory."""
    ranks = list(enumerate(memory))
    return ranks if len(ranks) <= 8 else [max(ranks, key=lambda entry: entry[1].total_bytes)]
