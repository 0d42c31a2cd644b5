"""Which rank this process is."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Where the launcher put this rank. Both ours and torchrun say it in these environment variables."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    node: int

    @classmethod
    def from_environment(cls) -> "Seat | None":
        """The seat of this process, or None if no launcher started it."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
            return None
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            world=world,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            node=int(os.environ.get("GROUP_RANK", 0)),
        )
