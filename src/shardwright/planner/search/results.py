"""What a search has found: the best plan of each kind so far, and at its end the plans to show."""

from dataclasses import dataclass, field

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.planner.search.plan_block import Column, PlanBlock


@dataclass
class SearchTally:
    """What a search did: plans of the space, bounds computed, plans priced in full, and those of them that fit."""

    num_plans: int = 0
    num_bounds: int = 0
    num_priced: int = 0
    num_fit: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One plan that was found: the job under it, and its seconds by token."""

    job: JobSpec
    token_s: float


@dataclass(frozen=True)
class TriedSize:
    """The fastest plan on some of a cluster's nodes: devices, and seconds by token, endless where none fits."""

    num_devices: int
    token_s: float


@dataclass(frozen=True)
class Found:
    """The fastest plans that fit, each of another kind, fastest first; and how much was looked at. `tried` are the
    sizes of the cluster that were compared, smallest first, where the objective chooses one."""

    candidates: list[Candidate]
    tally: SearchTally
    tried: tuple[TriedSize, ...] = ()


@dataclass
class Best:
    """The fastest plan of each kind so far: seconds by token, and where it is."""

    token_s: Column
    place: dict[int, tuple[PlanBlock, int]] = field(default_factory=dict)

    def take(self, block: PlanBlock, token_s: Column, chosen: Column) -> None:
        """Plans of a block, of those at the indices `chosen`."""
        chosen = chosen[np.argsort(token_s[chosen], kind="stable")]
        kinds, first = np.unique(block.columns["kind"][chosen], return_index=True)
        for kind, index in zip(kinds.tolist(), chosen[first].tolist(), strict=True):
            if token_s[index] < self.token_s[kind]:
                self.token_s[kind] = token_s[index]
                self.place[kind] = block, index
