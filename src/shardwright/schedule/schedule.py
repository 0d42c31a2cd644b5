"""A schedule (compute actions of each rank, in order) and a program (a schedule with all communication written out)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.message_sizes import Sizes
from shardwright.sharding.stage_placement import StagePlacement

Order = tuple[tuple[Action, ...], ...]  # one list of actions a rank
AnySchedule = TypeVar("AnySchedule", bound="Schedule")


@dataclass(frozen=True)
class Schedule:
    """The compute actions of each rank, in order, and the placement of the stages.

    A schedule that updates weights while the pipeline is full has reductions and steps in its lists. Any other gets
    them once, at the end, when it is lowered. `weights` is the version of its stage's weights that the forward and the
    backward of a microbatch use. "current": no update happens between the two. "stashed": the latest version at the
    forward is stashed for the backward (PipeDream). "double-buffered": two versions are kept, and the one of the
    previous batch is used (PipeDream-2BW).
    """

    name: str
    num_microbatches: int
    placement: StagePlacement
    ranks: Order
    weights: Literal["current", "stashed", "double-buffered"] = "current"

    @property
    def num_stages(self) -> int:
        """Number of pieces that the model is cut into."""
        return self.placement.num_stages

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.ranks)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of the backwards that run as I and W."""
        return self._computed_as(Kind.WEIGHT_GRAD)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of the forwards that are recomputed before their backward."""
        return self._computed_as(Kind.RECOMPUTE)

    def _computed_as(self, kind: Kind) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of all actions of a kind, in pairs too."""
        pair = Kind.OVERLAP
        actions = [action for row in self.ranks for action in row if action[0] is kind or action[0] is pair]
        return frozenset(part[1:3] for action in actions for part in action.parts or (action,) if part[0] is kind)

    @cached_property
    def trains(self) -> bool:
        """True if the schedule has any backward."""
        return any(part.kind is not Kind.FORWARD for row in self.ranks for a in row for part in a.computes())


@dataclass(frozen=True)
class Program(Schedule):
    """A schedule whose lists also hold sends, receives, gradient reductions and the optimizer step. `sizes` are the
    bytes that they move; None if unknown."""

    sizes: Sizes | None = None

    @cached_property
    def gathers(self) -> bool:
        """True if parameters are sharded, and gathered before they are used."""
        return any(action.kind is Kind.GATHER for row in self.ranks for action in row)

    def num_bytes(self, action: Action) -> int | None:
        """The bytes that an action moves: a send's or receive's message, a reduction's or gather's full tensor."""
        if self.sizes is None:
            return None
        if action.kind in SEND or action.kind in RECV:
            return self.sizes.message
        if action.kind is Kind.REDUCE:
            return self.sizes.reduce[action.stage]
        return self.sizes.gather[action.stage] if action.kind is Kind.GATHER else 0

    def text(self) -> str:
        """The lists as text, one line per rank."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))
