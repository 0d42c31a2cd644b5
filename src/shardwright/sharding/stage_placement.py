"""The placement of a model's stages on the ranks of a pipeline."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwright.config.schedule_facts import SCHEDULES


@dataclass(frozen=True)
class StagePlacement:
    """Stage to rank, for each copy of the parameters.

    Most schedules have one copy. A bidirectional one (DualPipe) has two, laid out in opposite directions; microbatch i
    passes through copy `copy_of[i]`, or copy 0 if that is empty.
    """

    holders: tuple[tuple[int, ...], ...]
    copy_of: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Pieces that the model is cut into."""
        return len(self.holders[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return 1 + max(rank for row in self.holders for rank in row)

    @property
    def num_copies(self) -> int:
        """Copies of the parameters in one pipeline."""
        return len(self.holders)

    def copy(self, microbatch: int) -> int:
        """The copy that a microbatch passes through."""
        return self.copy_of[microbatch] if self.copy_of else 0

    def rank(self, stage: int, microbatch: int) -> int:
        """The rank that runs a stage for a microbatch."""
        return self.holders[self.copy(microbatch)][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, first to last, of all copies."""
        return self._stages_by_rank.get(rank, ())

    @cached_property
    def _stages_by_rank(self) -> dict[int, tuple[int, ...]]:
        stages_of_rank: dict[int, set[int]] = {}
        for row in self.holders:
            for stage, holder in enumerate(row):
                stages_of_rank.setdefault(holder, set()).add(stage)
        return {rank: tuple(sorted(stages)) for rank, stages in stages_of_rank.items()}

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a copy of a stage."""
        return tuple(row[stage] for row in self.holders)


def placement_of(schedule: str, num_ranks: int, stages_per_rank: int) -> StagePlacement:
    """The stage placement of a schedule of plan.schedule; of a bidirectional one, for two microbatches."""
    placement: StagePlacement = SCHEDULES[schedule].placement(num_ranks, stages_per_rank)
    return placement


def in_line(num_ranks: int) -> StagePlacement:
    """Stage s on rank s."""
    return StagePlacement((tuple(range(num_ranks)),))


@lru_cache(maxsize=4096)
def looped(num_ranks: int, num_chunks: int) -> StagePlacement:
    """Stage s on rank s mod p: each rank holds `num_chunks` pieces, p stages apart."""
    return StagePlacement((tuple(stage % num_ranks for stage in range(num_ranks * num_chunks)),))


def vee(num_ranks: int) -> StagePlacement:
    """Two stages per rank, down and back up: stages s and 2p - 1 - s on rank s. The first and the last share rank 0."""
    return StagePlacement(((*range(num_ranks), *reversed(range(num_ranks))),))


def bidirectional(num_ranks: int, num_microbatches: int) -> StagePlacement:
    """Two copies in opposite directions; the first half of the microbatches goes down, the second half up."""
    forward = tuple(range(num_ranks))
    half = num_microbatches // 2
    return StagePlacement((forward, forward[::-1]), (0,) * half + (1,) * (num_microbatches - half))
