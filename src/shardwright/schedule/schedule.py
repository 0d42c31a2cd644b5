"""A schedule (who computes what, in which order) and a program (the same with all communication written out)."""

from dataclasses import dataclass

from shardwright.schedule.action import Action, Kind

Order = tuple[tuple[Action, ...], ...]  # one list of actions a rank


@dataclass(frozen=True)
class Schedule:
    """Compute actions of each rank, in order.

    `rank_of[stage]` is the placement: which pipeline rank holds a stage.
    """

    name: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    ranks: Order

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, first to last."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)


@dataclass(frozen=True)
class Program(Schedule):
    """A schedule whose lists also hold sends, receives, gradient reductions and the optimizer step."""

    def text(self) -> str:
        """One line a rank."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))


def peak_activations(schedule: Schedule) -> list[int]:
    """Most microbatches whose activations are alive at once, by rank.

    Alive is from the start of F to the end of B, or of W where the backward is split. A forward-only program
    keeps nothing.
    """
    peaks = []
    for row in schedule.ranks:
        computes = [action for entry in row for action in entry.computes()]
        split = {(a.stage, a.microbatch) for a in computes if a.kind is Kind.WEIGHT_GRAD}
        freed = {(a.stage, a.microbatch) for a in computes if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)}
        alive = peak = 0
        for action in computes:
            key = (action.stage, action.microbatch)
            if action.kind is Kind.FORWARD and key in freed:
                alive += 1
                peak = max(peak, alive)
            elif action.kind is Kind.WEIGHT_GRAD or (action.kind is Kind.BACKWARD and key not in split):
                alive -= 1
        peaks.append(peak)
    return peaks
