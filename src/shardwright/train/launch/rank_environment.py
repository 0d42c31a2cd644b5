"""The environment of a rank: its number, the store in which ranks meet, and the variables that torch and NCCL read."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.config.base import PlanError
from shardwright.config.phrase import say

LOCALHOST = "127.0.0.1"
# Rank 0 reports an error of all ranks. torchrun ends all ranks when the first one leaves, so the others wait so long.
SPEAKING_S = 10.0

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_RANKS = 2**24
# The smallest and largest value of each variable. Missing values follow from the others.
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
    """A rank's numbers, as its launcher set them, and the rendezvous store of all ranks.

    If not `store_is_up`, rank 0 hosts the store. If `store_is_used`, earlier attempts may have used it.
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
        """The environment of this process, or None if no launcher such as torchrun started it. Raises PlanError."""
        variables = os.environ
        if not variables.get("RANK", "").strip():
            return None
        if faults := _faults(variables):
            raise PlanError(say("the variables of a launcher"), faults)
        has_agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps it over attempts
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        return cls(
            rank=rank,
            local_rank=int(variables.get("LOCAL_RANK", rank)),
            world=world,
            local_world=int(variables.get("LOCAL_WORLD_SIZE", world)),
            store_host=variables["MASTER_ADDR"],
            store_port=int(variables["MASTER_PORT"]),
            store_is_up=has_agent_store,
            store_is_used=has_agent_store,
        )


def is_other_rank() -> bool:
    """True if a launcher has started this process as another rank than 0, which tells what all ranks find."""
    rank = os.environ.get("RANK", "").strip()
    return rank.isdecimal() and rank.strip("0") != ""


@contextmanager
def refused_by_rank_0() -> Iterator[None]:
    """A context whose PlanError, which every rank raises, leaves rank 0 alone: the others give it time to report, and
    end with status 2."""
    try:
        with rank_0_first():
            yield
    except PlanError:
        if not is_other_rank():
            raise
        sys.exit(2)


@contextmanager
def rank_0_first() -> Iterator[None]:
    """A context whose PlanError leaves other ranks than 0 after rank 0 had time to report it, whereupon the launcher
    ends them. It may be theirs alone, if a file is missing on their machine."""
    try:
        yield
    except PlanError:
        if is_other_rank():
            time.sleep(SPEAKING_S)
        raise


def allowed_threads() -> int:
    """The number of threads of a process from OMP_NUM_THREADS, at most the number of cores; 0 if it is not set.

    Threads wait for each other in busy loops: with more threads than free cores, operators take many times as long.
    torchrun sets the variable to 1 by default, so under torchrun a 1 counts as not set.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()[:9]
    if not (text.isascii() and text.isdigit()) or (text == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return 0
    return min(int(text), os.cpu_count() or 1)


def _faults(variables: Mapping[str, str]) -> list[str]:
    """Faults of the variables that torchrun, or another launcher, should have set."""
    way_out = say("start the ranks with torchrun, or unset RANK to have them started here")
    faults: list[str] = [
        say("RANK is set and {name} is not; {way_out}", name=name, way_out=way_out)
        for name in _NEEDED
        if not variables.get(name, "").strip()
    ]
    numbers = {}
    for name, (smallest, largest) in _NUMBERS.items():
        text = variables.get(name, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_RANKS))):
            faults.append(
                say(
                    "{name} is {text}, and not a whole number of at least {smallest}; {way_out}",
                    name=name,
                    text=repr(text[:40]),
                    smallest=smallest,
                    way_out=way_out,
                )
            )
        elif not smallest <= int(text) <= largest:
            faults.append(
                say(
                    "{name} is {text}, and not from {smallest} to {largest}; {way_out}",
                    name=name,
                    text=text,
                    smallest=smallest,
                    largest=largest,
                    way_out=way_out,
                )
            )
        else:
            numbers[name] = int(text)
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in numbers and size in numbers and numbers[name] >= numbers[size]:
            faults.append(
                say(
                    "{name} {number} is not below {size} {most}: ranks count from 0; {way_out}",
                    name=name,
                    number=numbers[name],
                    size=size,
                    most=numbers[size],
                    way_out=way_out,
                )
            )
    return faults


# The second is the older name of the same variable.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


_COMPILER_THREADS = 4  # for each rank; torch's default is one for each core, at most 32


def set_device_environment(local_world: int, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch and NCCL read on one of `local_world` ranks of a node, unless they are set already.
    Call it before CUDA starts.

    Expandable segments serve tensors of all sizes: experts get different numbers of rows in each step, and segments of
    fixed size waste memory. NCCL prints why it fails. Several ranks on a node share the cores for compiler threads.
    """
    if not any(name in variables for name in _ALLOCATOR):
        variables[_ALLOCATOR[0]] = "expandable_segments:True"
    variables.setdefault("NCCL_DEBUG", "WARN")
    if local_world > 1:
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_COMPILER_THREADS))
