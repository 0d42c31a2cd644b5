"""The number of this process's rank, and the place where the ranks meet."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.config.base import PlanError

LOCALHOST = "127.0.0.1"

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_RANKS = 2**24
# Smallest and largest values; a missing one follows from the others.
_NUMBERS = {
    "RANK": (0, _MOST_RANKS),
    "WORLD_SIZE": (1, _MOST_RANKS),
    "LOCAL_RANK": (0, _MOST_RANKS),
    "LOCAL_WORLD_SIZE": (1, _MOST_RANKS),
    "GROUP_RANK": (0, _MOST_RANKS),
    "MASTER_PORT": (1, 65535),
}


@dataclass(frozen=True)
class RankEnvironment:
    """Where a launcher put this rank, and the store in which all ranks meet.

    Either the store is up before the ranks are, or the first of them hosts it. Attempts before this one may have
    met in it where `store_is_used`.
    """

    rank: int
    local_rank: int
    world: int
    local_world: int
    store_host: str = LOCALHOST
    store_port: int = 0
    store_is_up: bool = True
    store_is_used: bool = False

    @classmethod
    def from_environment(cls) -> "RankEnvironment | None":
        """The seat of this process, or None if no launcher such as torchrun started it. Raises PlanError."""
        variables = os.environ
        if not variables.get("RANK", "").strip():
            return None
        if faults := _faults(variables):
            raise PlanError("the variables of a launcher", faults)
        of_agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, which keeps it
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        return cls(
            rank=rank,
            local_rank=int(variables.get("LOCAL_RANK", rank)),
            world=world,
            local_world=int(variables.get("LOCAL_WORLD_SIZE", world)),
            store_host=variables["MASTER_ADDR"],
            store_port=int(variables["MASTER_PORT"]),
            store_is_up=of_agent,
            store_is_used=of_agent,
        )


def allowed_threads() -> int:
    """Threads that OMP_NUM_THREADS gives each process, of no more than there are cores; 0 where it says nothing.

    Threads wait for each other in loops: with more of them than cores are free, each operator takes many times as long.
    torchrun sets the variable to 1 where nobody has, and there that means nothing.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()[:9]
    if not (text.isascii() and text.isdigit()) or (text == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return 0
    return min(int(text), os.cpu_count() or 1)


def _faults(variables: Mapping[str, str]) -> list[str]:
    """Faults of the variables that torchrun, or whatever started this rank, should have set."""
    way_out = "start the ranks with torchrun, or unset RANK to have them started here"
    faults = [f"RANK is set and {name} is not; {way_out}" for name in _NEEDED if not variables.get(name, "").strip()]
    numbers = {}
    for name, (least, most) in _NUMBERS.items():
        text = variables.get(name, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_RANKS))):
            faults.append(f"{name} is {text[:40]!r}, and not a whole number of at least {least}; {way_out}")
        elif not least <= int(text) <= most:
            faults.append(f"{name} is {text}, and not from {least} to {most}; {way_out}")
        else:
            numbers[name] = int(text)
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in numbers and of in numbers and numbers[name] >= numbers[of]:
            faults.append(f"{name} {numbers[name]} is not below {of} {numbers[of]}: ranks count from 0; {way_out}")
    return faults
