"""A schedule (who computes what, in which order) and a program (the same with all communication written out)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.placement import Placement

Order = tuple[tuple[Action, ...], ...]  # one list of actions a rank


@dataclass(frozen=True)
class Schedule:
    """Compute actions of each rank, in order, and where the stages are.

    A schedule that updates weights while the pipeline is full holds its own reductions and steps; any other gets
    them, once and at the end, when it is lowered. `weights` says which version of its stage's weights a microbatch
    is computed with, forward and backward: the current one, which no update touches in between; the latest at its
    forward, stashed for its backward (PipeDream); or that of the batch before, of two that are kept (PipeDream-2BW).
    """

    name: str
    num_microbatches: int
    placement: Placement
    ranks: Order
    weights: Literal["current", "stashed", "double-buffered"] = "current"

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return self.placement.num_stages

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of the backwards that run as I and W."""
        return frozenset(
            (part.stage, part.microbatch)
            for row in self.ranks
            for action in row
            for part in action.computes()
            if part.kind is Kind.WEIGHT_GRAD
        )

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards at all."""
        return any(part.kind is not Kind.FORWARD for row in self.ranks for a in row for part in a.computes())


@dataclass(frozen=True)
class Program(Schedule):
    """A schedule whose lists also hold sends, receives, gradient reductions and the optimizer step."""

    def text(self) -> str:
        """One line a rank."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))


def peak_activations(schedule: Schedule) -> list[int]:
    """Most (stage, microbatch) pairs whose activations are alive at once, by rank.

    Alive is from F to the end of B, or of W where the backward is split. Divide by the stages of a rank to get
    microbatches of all its layers. A forward-only program keeps nothing.
    """
    peaks = []
    for row in schedule.ranks:
        alive = peak = 0
        for action in row:
            parts = action.computes()
            # In an overlapped pair both are alive at once: what begins is counted before what ends.
            alive += sum(part.kind is Kind.FORWARD for part in parts) if schedule.trains else 0
            peak = max(peak, alive)
            for part in parts:
                split = (part.stage, part.microbatch) in schedule.split_backwards
                alive -= part.kind is Kind.WEIGHT_GRAD or (part.kind is Kind.BACKWARD and not split)
        peaks.append(peak)
    return peaks
