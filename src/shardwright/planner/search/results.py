"""Results of a search: the best plans of each kind so far, and at its end the plans to show."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.planner.search.plan_block import Column, PlanBlock, PlanVariant, kind_codes, select
from shardwright.planner.search.step_times import StepTimes
from shardwright.simulate.closed_form import StepTime

_MOST_ALIKE = 5  # plans of a kind with the same schedule that are kept if there are other schedules

# Plans that agree in variant, schedule, virtual stages and microbatch: only the fastest of them is kept.
Likeness = tuple[PlanVariant, int, int, int]


@dataclass
class SearchTally:
    """Counts of a search: plans of the space, bounds computed, plans priced, plans that fit by their price, and plans
    whose step was simulated."""

    num_plans: int = 0
    num_bounds: int = 0
    num_priced: int = 0
    num_fit: int = 0
    num_simulated: int = 0
    seconds: float = 0.0

    def add(self, later: "SearchTally") -> None:
        """Add the work of a later search through a part of the same space."""
        self.num_bounds += later.num_bounds
        self.num_priced += later.num_priced
        self.num_fit += later.num_fit


@dataclass(frozen=True)
class Candidate:
    """A plan that a search returns: the job under it, and its seconds a token."""

    job: JobSpec
    token_s: float


@dataclass(frozen=True)
class SimulatedPlan(Candidate):
    """A plan with its simulated step, `time`. If `plan.layout` is uneven, `even_s` is the step with an even layout."""

    time: StepTime
    even_s: float | None = None


@dataclass(frozen=True)
class TriedSize:
    """A part of a cluster and its fastest plan: devices, seconds a token, infinite if no plan fits, and the share of a
    run's time that trains, 1 if the objective counts no failures."""

    num_devices: int
    token_s: float
    training_share: float = 1.0

    @property
    def run_token_s(self) -> float:
        """Seconds a token with the time that does not train."""
        return self.token_s / self.training_share


@dataclass(frozen=True)
class SearchResult:
    """The fastest plans that fit, one of each kind, fastest first, and the counts of the search. If the objective
    chooses the size of the cluster, `tried` are the sizes that were compared, smallest first. `times` has the steps of
    all plans that were simulated."""

    candidates: list[SimulatedPlan]
    tally: SearchTally
    times: StepTimes
    tried: tuple[TriedSize, ...] = ()


@dataclass(frozen=True)
class PlanPlace:
    """A plan of a block, with its seconds a token."""

    token_s: float
    block: PlanBlock
    index: int

    def plan(self, job: JobSpec) -> JobSpec:
        """The job under the plan."""
        return self.block.plan(self.index, job)

    @property
    def kind(self) -> int:
        """The code of the plan's kind."""
        return int(kind_codes(select(self.block.columns, np.array([self.index])))[0])


@dataclass
class Best:
    """The fastest plans of each kind so far: at most `depth` of a kind, each with another order of work, and few with
    one schedule, because the error of closed forms is alike within a schedule.

    For each kind `token_s` is the time of its fastest plan, and `last_s` that of its slowest kept plan, or infinite
    while fewer than `depth` are kept; both in seconds a token.
    """

    token_s: Column
    last_s: Column
    depth: int
    places: dict[int, dict[Likeness, PlanPlace]] = field(default_factory=dict)
    _best_s: float = math.inf

    @classmethod
    def of_kinds(cls, num_kinds: int, depth: int) -> "Best":
        """An empty record for `num_kinds` kinds."""
        return cls(np.full(num_kinds, np.inf), np.full(num_kinds, np.inf), depth)

    def take(self, block: PlanBlock, token_s: Column, chosen: Column) -> None:
        """Add those plans of a block whose indices are `chosen`, if they are fast enough."""
        columns, schedule = block.columns, block.schedule
        for index in chosen[np.argsort(token_s[chosen], kind="stable")].tolist():
            kind, seconds = int(columns["kind"][index]), float(token_s[index])
            if seconds >= self.last_s[kind]:
                continue
            virtual, microbatch = int(columns["virtual_stages"][index]), int(columns["microbatch_size"][index])
            likeness = (block.variant, int(schedule[index]), virtual, microbatch)
            kept_places = self.places.setdefault(kind, {})
            if likeness in kept_places and kept_places[likeness].token_s <= seconds:
                continue
            kept_places[likeness] = PlanPlace(seconds, block, index)
            if len(kept_places) > self.depth:
                alike = Counter(schedule for _, schedule, _, _ in kept_places)
                crowded = [key for key in kept_places if alike[key[1]] > _MOST_ALIKE]
                del kept_places[max(crowded or kept_places, key=lambda key: kept_places[key].token_s)]
            times = [place.token_s for place in kept_places.values()]
            self.token_s[kind] = min(times)
            self.last_s[kind] = max(times) if len(times) == self.depth else np.inf

    def next_best(self) -> PlanPlace | None:
        """The fastest plan of all kinds, if it is faster than at the previous call."""
        kind = int(self.token_s.argmin())
        if self.token_s[kind] >= self._best_s:
            return None
        self._best_s = float(self.token_s[kind])
        return self.plans_of_kind(kind)[0]

    def plans_of_kind(self, kind: int) -> list[PlanPlace]:
        """The kept plans of a kind, fastest first."""
        return sorted(self.places.get(kind, {}).values(), key=lambda place: place.token_s)
