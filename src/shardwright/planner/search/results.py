"""What a search finds: the best plans of each kind so far, and at its end the plans to show."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.planner.search.plan_block import Column, PlanBlock, Words
from shardwright.simulate.closed_form import StepTime

_MOST_ALIKE = 5  # plans of a kind with the same schedule that are kept where there are others

# What plans have in common of which one is kept: words, schedule, virtual stages, microbatch.
Likeness = tuple[Words, int, int, int]


@dataclass
class SearchTally:
    """What a search did: plans of the space, bounds computed, plans priced in full, those of them that fit, and plans
    whose step was simulated in full."""

    num_plans: int = 0
    num_bounds: int = 0
    num_priced: int = 0
    num_fit: int = 0
    num_played: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One plan that was found: the job under it, and its seconds by token."""

    job: JobSpec
    token_s: float


@dataclass(frozen=True)
class PlayedPlan(Candidate):
    """A plan whose step was simulated in full, in `time`; `even_s` is what the step takes with layers spread evenly,
    where `plan.layout` is better."""

    time: StepTime
    even_s: float | None = None


@dataclass(frozen=True)
class TriedSize:
    """The fastest plan on some of a cluster's nodes: devices, and seconds by token, endless where none fits."""

    num_devices: int
    token_s: float


@dataclass(frozen=True)
class Found:
    """The fastest plans that fit, each of another kind, fastest first; and how much was looked at. `tried` are the
    sizes of the cluster that were compared, smallest first, where the objective chooses one."""

    candidates: list[PlayedPlan]
    tally: SearchTally
    tried: tuple[TriedSize, ...] = ()


@dataclass(frozen=True)
class FoundPlace:
    """A plan of a block, with its seconds by token."""

    token_s: float
    block: PlanBlock
    index: int


@dataclass
class Best:
    """The fastest plans of each kind so far, `depth` of them at most, each of another order of work (`likeness`), and
    few of the same schedule: how far closed forms are off is one of the schedule.

    `token_s` has seconds by token of a kind's fastest plan, and `last_s` of the last one that is kept: endless where
    there is room for more.
    """

    token_s: Column
    last_s: Column
    depth: int
    places: dict[int, dict[Likeness, FoundPlace]] = field(default_factory=dict)

    @classmethod
    def of_kinds(cls, num_kinds: int, depth: int) -> "Best":
        """Nothing yet."""
        return cls(np.full(num_kinds, np.inf), np.full(num_kinds, np.inf), depth)

    def take(self, block: PlanBlock, token_s: Column, chosen: Column) -> None:
        """Plans of a block, of those at the indices `chosen`."""
        columns, schedule = block.columns, block.schedule
        for index in chosen[np.argsort(token_s[chosen], kind="stable")].tolist():
            kind, seconds = int(columns["kind"][index]), float(token_s[index])
            if seconds >= self.last_s[kind]:
                continue
            virtual, microbatch = int(columns["virtual_stages"][index]), int(columns["microbatch_size"][index])
            likeness = (block.words, int(schedule[index]), virtual, microbatch)
            mine = self.places.setdefault(kind, {})
            if likeness in mine and mine[likeness].token_s <= seconds:
                continue
            mine[likeness] = FoundPlace(seconds, block, index)
            if len(mine) > self.depth:
                alike = Counter(schedule for _, schedule, _, _ in mine)
                crowded = [key for key in mine if alike[key[1]] > _MOST_ALIKE]
                del mine[max(crowded or mine, key=lambda key: mine[key].token_s)]
            times = [place.token_s for place in mine.values()]
            self.token_s[kind] = min(times)
            self.last_s[kind] = max(times) if len(times) == self.depth else np.inf

    def of(self, kind: int) -> list[FoundPlace]:
        """The plans of a kind that are kept, fastest first."""
        return sorted(self.places.get(kind, {}).values(), key=lambda place: place.token_s)
